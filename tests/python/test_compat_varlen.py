"""test_compat_varlen.py: torch.nn.attention.varlen's signature: that of the installed PyTorch, values, refusals."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_close, truth
from flash_dmattn.compat.varlen import varlen_attn

ROWS, KEYS = (0, 5, 5, 11), (0, 7, 9, 15)


def inputs(heads=2):
    torch.manual_seed(4)
    q, k, v = torch.randn(11, 4, 16), torch.randn(15, heads, 16), torch.randn(15, heads, 16)
    offsets = [torch.tensor(each, dtype=torch.int32) for each in (ROWS, KEYS)]
    return [each.requires_grad_() for each in (q, k, v)], (*offsets, 6, 7)


def test_parameters_are_pytorchs():
    theirs = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    ours, want = (inspect.signature(each).parameters for each in (varlen_attn, theirs))
    if "block_table" not in want:
        pytest.skip("PyTorch's function had fewer parameters before 2.12")
    assert [(each.name, each.kind, each.default) for each in ours.values()] == [
        (each.name, each.kind, each.default) for each in want.values()
    ]


@pytest.mark.parametrize("used", [None, (3, 2, 6)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)])
def test_values_and_gradients(window, used):
    (q, k, v), packing = inputs()
    counted = None if used is None else torch.tensor(used, dtype=torch.int32)
    out, lse = varlen_attn(
        q, k, v, *packing, return_aux=SimpleNamespace(lse=True), scale=0.3, window_size=window, enable_gqa=True,
        seqused_k=counted,
    )  # fmt: skip
    assert lse.shape == (4, 11)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for b in range(3):
        rows, first = slice(ROWS[b], ROWS[b + 1]), KEYS[b]
        keys = slice(first, KEYS[b + 1] if used is None else first + used[b])
        part = [each.detach()[None, at].double().requires_grad_() for each, at in ((q, rows), (k, keys), (v, keys))]
        want, want_lse, _ = truth(*part, scale=0.3, window=window)
        assert_close(out[None, rows], want, torch.float32, "out")
        assert_close(lse[None, :, rows], want_lse, torch.float32, "lse")
        want.backward(dout[None, rows].double())
        for have, each, at in zip(grads, part, (rows, keys, keys)):
            assert_close(have[None, at], each.grad, torch.float32, "gradient")


def test_out_alone():
    (q, k, v), packing = inputs(4)
    both = varlen_attn(q, k, v, *packing, return_aux=SimpleNamespace(lse=True))
    for aux in (None, SimpleNamespace(lse=False)):
        assert torch.equal(varlen_attn(q, k, v, *packing, return_aux=aux, num_splits=1), both[0])


def test_refusals():
    (q, k, v), packing = inputs()
    with pytest.raises(RuntimeError, match="query has 4 heads and key 2: write enable_gqa=True"):
        varlen_attn(q, k, v, *packing)
    with pytest.raises(ValueError, match="key_cache has 3 axes; it needs 4"):
        varlen_attn(q, k, v, *packing, enable_gqa=True, block_table=packing[0])
    with pytest.raises(ValueError, match="cu_seq_k is None"):
        varlen_attn(q, k, v, packing[0], None, 6, 7, enable_gqa=True)
    with pytest.raises(ValueError, match="cu_seq_q is None"):
        varlen_attn(q[None], k[None], v[None], None, packing[1], 6, 7, enable_gqa=True)


def test_compiles_as_one_graph():
    (q, k, v), packing = inputs()
    compiled = torch.compile(varlen_attn, fullgraph=True, backend="aot_eager")
    given = dict(window_size=(-1, 0), enable_gqa=True)
    assert_close(compiled(q, k, v, *packing, **given), varlen_attn(q, k, v, *packing, **given), torch.float32, "out")
