"""test_compiled_options.py: what eager calls take, compiled ones take; new values of numbers compile nothing anew."""

import numpy as np
import pytest
import torch
from flash_dmattn import attention, flash_dmattn_func, flash_dmattn_varlen_func, masks, scaled_dot_product_attention
from torch._dynamo.testing import CompileCounterWithBackend

OPTIONS = {
    "scale": {"scale": 0.3},
    "scale as an int": {"softmax_scale": 1},
    "scale as NumPy's": {"softmax_scale": np.float32(0.25)},
    "scale as a tensor": {"softmax_scale": torch.tensor(0.3)},
    "scale as a tensor of one axis": {"softmax_scale": torch.tensor([0.3])},
    "softcap": {"softcap": 2.0},
    "softcap as a tensor": {"softcap": torch.tensor(2.0, dtype=torch.float64)},
    "no softcap": {"softcap": None},
    "causal": {"is_causal": True},
    "causal as 1": {"is_causal": 1, "deterministic": 0},
    "not causal": {"is_causal": None, "deterministic": None},
    "window": {"window_size": (2, 1)},
    "window, None": {"window_size": (None, 1)},
    "window as a list": {"window_size": [2, None]},
    "mask of two axes": {"attn_mask": torch.rand(2, 7) < 0.7},
    "mask of three axes": {"attn_mask": torch.rand(2, 2, 7) < 0.7},
    "mask of four axes": {"attn_mask": torch.rand(1, 4, 6, 7) < 0.7},
    "bias of three axes": {"attn_bias": torch.randn(2, 2, 7)},
    "bias of four axes": {"attn_bias": torch.randn(2, 1, 6, 7)},
    "intervals": {"key_intervals": tuple(masks.causal_intervals(6, 7, "torch"))},
    "intervals that know their rows": {"key_intervals": masks.causal_intervals(6, 7, "torch")},
    "lse": {"return_lse": True},
    "probabilities": {"return_attn_probs": True},
    "probabilities, softcap as a tensor": {"return_attn_probs": True, "softcap": torch.tensor(2.0)},
    "keywords of flash-attn": {"dropout_p": 0.0, "alibi_slopes": None},
}


def compiled(function, dynamic, counter=None):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter or "aot_eager")


@pytest.mark.rotates(3)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_every_option(name, dynamic):
    q, k = torch.randn(2, 6, 4, 8, requires_grad=True), torch.randn(2, 7, 2, 8, requires_grad=True)

    def call(q, k, options):
        return flash_dmattn_func(q, k, k, **options)

    options = OPTIONS[name]
    have, want = compiled(call, dynamic)(q, k, options), call(q, k, options)
    for ours, eager in zip(have if isinstance(have, tuple) else [have], want if isinstance(want, tuple) else [want]):
        assert torch.equal(ours, eager)
    out = have[0] if isinstance(have, tuple) else have
    eager = want[0] if isinstance(want, tuple) else want
    for ours, theirs in zip(*(torch.autograd.grad(each.square().sum(), (q, k)) for each in (out, eager))):
        assert torch.allclose(ours, theirs, atol=1e-6)


def functions():
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    return {
        "scale": lambda q, number: flash_dmattn_func(q, q, q, softmax_scale=number, is_causal=True),
        "softcap": lambda q, number: flash_dmattn_func(q, q, q, softcap=number),
        "beside a bias": lambda q, number: flash_dmattn_func(q, q, q, attn_bias=q[..., 0].mT[:, :, None], scale=number),
        "probabilities": lambda q, number: flash_dmattn_func(q, q, q, scale=number, return_attn_probs=True)[0],
        "an int": lambda q, number: flash_dmattn_func(q, q, q, softmax_scale=int(100 * number)),
        "packed": lambda q, number: flash_dmattn_varlen_func(q[0], q[0], q[0], offsets, offsets, 4, 4, number),
        "arrays": lambda q, number: attention(q, q, q, softmax_scale=number),
        "sdpa": lambda q, number: scaled_dot_product_attention(q, q, q, scale=number),
    }


@pytest.mark.parametrize("name", list(functions()))
def test_new_numbers_compile_nothing(name):
    function, counter = functions()[name], CompileCounterWithBackend("aot_eager")
    fast, q = compiled(function, True, counter), torch.randn(2, 6, 4, 8, requires_grad=True)
    fast(q, 0.5)
    first = counter.frame_count
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in (0.25, 0.3, 0.7, 0.1):
            have, want = fast(q, number), function(q, number)
            assert torch.equal(have, want)
            gradients = [torch.autograd.grad(each.square().sum(), q)[0] for each in (have, want)]
            assert torch.allclose(*gradients, atol=1e-6)
    assert counter.frame_count == first


def test_new_lengths_and_windows_compile_nothing():
    counter = CompileCounterWithBackend("aot_eager")

    def function(q, window):
        pair = masks.topk_intervals(q[..., 0].mT, window, q.shape[1])
        return flash_dmattn_func(q, q, q, window_size=(window, 0), key_intervals=pair)

    fast = compiled(function, True, counter)
    for length, window in ((6, 3), (7, 2), (9, 4)):
        q = torch.randn(2, length, 4, 8)
        assert torch.equal(fast(q, window), function(q, window))
    assert counter.frame_count == 1


def test_a_constant_stays_a_number_of_the_graph():
    """A tensor on the CPU among the inputs would keep compiled code out of CUDA graphs."""
    seen = []

    def backend(module, inputs):
        seen.extend(node for node in module.graph.nodes if "flash_dmattn" in str(node.target))
        return module

    torch._dynamo.reset()
    torch.compile(lambda q: flash_dmattn_func(q, q, q, softmax_scale=0.3), backend=backend)(torch.randn(1, 4, 2, 8))
    assert len(seen) == 1 and 0.3 in seen[0].args
