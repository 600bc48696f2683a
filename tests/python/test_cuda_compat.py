"""flash-attn's names on CUDA tensors: the calls whose masks and biases the stand-in makes, against the same call on the
CPU in float32. Skipped, with one line, where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_close
from flash_dmattn.compat import flash_attn, flash_attn_cute, flash_attn_interface
from flash_dmattn.compat.flash_attn import functions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: CUDA tensors are not covered")

ROWS, KEYS = (0, 150, 150, 433), (0, 190, 201, 500)
TAIL = 5  # rows of no sequence


def dense(heads=4, heads_kv=2, rows=283, keys=401, dim=64):
    torch.manual_seed(0)
    return [torch.randn(2, n, h, dim) for n, h in ((rows, heads), (keys, heads_kv), (keys, heads_kv))]


def packed():
    torch.manual_seed(1)
    return [torch.randn(n + TAIL, h, 64) for n, h in ((ROWS[-1], 4), (KEYS[-1], 2), (KEYS[-1], 2))]


def numbers(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def slopes(device):
    return torch.linspace(0.02, 0.5, 4, device=device)


def bounds(device):
    return numbers(ROWS, device), numbers(KEYS, device), 283, 299


def alibi(device, **options):
    return dict(alibi_slopes=slopes(device), return_attn_probs=True, **options)


def three(q, k, v, device, **options):
    used = dict(seqused_q=numbers((150, 0, 200), device), seqused_k=numbers((7, 11, 250), device))
    return flash_attn_interface.flash_attn_varlen_func(
        q, k, v, *bounds(device), **used, **options, return_attn_probs=True
    )


CALLS = {
    "causal": (dense, lambda *x, device: flash_attn.flash_attn_func(*x, causal=True, return_attn_probs=True)),
    "window": (dense, lambda *x, device: flash_attn.flash_attn_func(*x, window_size=(9, 3), return_attn_probs=True)),
    "alibi": (dense, lambda *x, device: flash_attn.flash_attn_func(*x, **alibi(device))),
    "alibi, window": (dense, lambda *x, device: flash_attn.flash_attn_func(*x, **alibi(device, window_size=(50, 9)))),
    "alibi, causal": (dense, lambda *x, device: flash_attn.flash_attn_func(*x, **alibi(device, causal=True))),
    "alibi, more rows": (
        lambda: dense(rows=401, keys=283), lambda *x, device: flash_attn.flash_attn_func(*x, **alibi(device)),
    ),
    "packed": (
        packed, lambda *x, device: flash_attn.flash_attn_varlen_func(*x, *bounds(device), return_attn_probs=True),
    ),
    "packed alibi": (
        packed, lambda *x, device: flash_attn.flash_attn_varlen_func(*x, *bounds(device), **alibi(device)),
    ),
    "packed alibi, causal": (
        packed, lambda *x, device: flash_attn.flash_attn_varlen_func(*x, *bounds(device), **alibi(device, causal=True)),
    ),
    "chunks": (
        dense,
        lambda *x, device: flash_attn_interface.flash_attn_func(*x, attention_chunk=37, return_attn_probs=True),
    ),
    "used lengths": (packed, lambda *x, device: three(*x, device)),
    "used lengths, causal, chunks": (packed, lambda *x, device: three(*x, device, causal=True, attention_chunk=64)),
    "negative bound": (
        dense, lambda *x, device: flash_attn_cute.flash_attn_func(*x, window_size=(None, -3), return_lse=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CALLS)
def test_as_on_the_cpu(name, dtype):
    make, call = CALLS[name]
    given = [each.to(dtype) for each in make()]
    results = {}
    for device in ("cpu", "cuda"):
        tensors = [each.to(device, torch.float32 if device == "cpu" else dtype).requires_grad_() for each in given]
        out, lse = call(*tensors, device=device)[:2]
        torch.manual_seed(3)
        dout = torch.randn(out.shape).to(dtype).to(device, out.dtype)
        results[device] = [each.cpu() for each in (out, lse, *torch.autograd.grad(out, tensors, dout))]
    assert torch.equal(results["cuda"][1].isinf(), results["cpu"][1].isinf())
    for what, have, want in zip(("out", "lse", "dq", "dk", "dv"), results["cuda"], results["cpu"]):
        assert_close(have, want, torch.bfloat16 if what == "lse" and dtype is not torch.float32 else dtype, what)


def test_ring_of_two_parts():
    """The private backward of each part of the keys, with the results of all."""
    q, k, v = (each.cuda().bfloat16().requires_grad_() for each in dense())
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    dout = torch.randn_like(out)
    want = torch.autograd.grad(out, (q, k, v), dout)
    total, parts = torch.zeros_like(q, dtype=torch.float32), []
    for part in (slice(0, 200), slice(200, 401)):
        grads = [torch.empty_like(each) for each in (q, k[:, part], v[:, part])]
        functions._flash_attn_backward(
            dout, q, k[:, part], v[:, part], out, lse, *grads, 0.0, 0.125, False, -1, -1, 0.0, None, False
        )
        total += grads[0]
        parts.append(grads[1:])
    assert_close(total, want[0], torch.bfloat16, "dq")
    for index in (0, 1):
        assert_close(torch.cat([part[index] for part in parts], 1), want[1 + index], torch.bfloat16, "dk, dv")
