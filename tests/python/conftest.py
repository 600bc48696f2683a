"""conftest.py: what the Python tests share: the truth in float64 PyTorch maths, random problems, and the choice of
cases. Of the cases of `pytest.mark.rotates(n)` a run takes one in n, and the commit says which; FDM_ALL_CASES=1 runs
them all, and `make test-long` does so."""

from __future__ import annotations

import os
import pathlib
import random
import sys
import zlib
from collections import defaultdict

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from flash_dmattn import _arguments

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "bench"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "scripts"))

# FDM_TEST_FAMILY=reference runs every test of this folder on that family.
_arguments.forced_family = os.environ.get("FDM_TEST_FAMILY")

def pytest_configure(config):
    config.addinivalue_line("markers", "rotates(n): of all cases with this n, a run takes one in n")


def pytest_collection_modifyitems(items):
    if os.environ.get("FDM_ALL_CASES") == "1":
        return
    drawn = zlib.crc32(os.environ.get("FDM_CHECK_SEED", "").encode())
    numbers = defaultdict(int)
    for item in items:
        mark = item.get_closest_marker("rotates")
        if mark is None:
            continue
        parts = mark.args[0]
        if (numbers[parts] + drawn) % parts:
            item.add_marker(pytest.mark.skip(reason="left to other draws; FDM_ALL_CASES=1 runs every case"))
        numbers[parts] += 1


TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 6e-2}


def spread(tensor, heads):
    """[B, h, ..] -> [B, H, ..]."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def visible_pairs(seqlen_q, seqlen_k, causal=False, window=(-1, -1)):
    row = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)[None]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal:
        visible = visible & (key <= row)
    if window[0] >= 0:
        visible = visible & (key >= row - window[0])
    if window[1] >= 0:
        visible = visible & (key <= row + window[1])
    return visible


def truth(q, k, v, mask=None, bias=None, scale=None, causal=False, softcap=0.0, window=(-1, -1), intervals=None):
    """(out, lse, probs) in float64 by the formula, differentiable. mask, bias 4-D; intervals [b, h, Sk]."""
    heads, seqlen_q, seqlen_k = q.shape[2], q.shape[1], k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * (q.transpose(1, 2) @ spread(k.transpose(1, 2), heads).transpose(2, 3))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_pairs(seqlen_q, seqlen_k, causal, window)[None, None].expand(scores.shape)
    if bias is not None:
        wide = spread(bias.double(), heads)
        visible = visible & (wide > -torch.inf)
        scores = scores + torch.where(wide > -torch.inf, wide, 0.0)
    if mask is not None:
        visible = visible & spread(mask, heads)
    if intervals is not None:
        row = torch.arange(seqlen_q)[:, None]
        start, end = (spread(each, heads)[:, :, None] for each in intervals)
        visible = visible & (start <= row) & (row < end)
    some = visible.any(-1, keepdim=True)
    safe = torch.where(visible, scores, torch.where(some, -torch.inf, 0.0))
    if seqlen_k == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(scores.shape[:3], torch.inf), scores
    probs = torch.where(visible, torch.softmax(safe, -1), 0.0)
    lse = torch.where(some[..., 0], torch.logsumexp(safe, -1), torch.inf)
    return (probs @ spread(v.transpose(1, 2), heads)).transpose(1, 2), lse, probs


def assert_close(actual, expected, dtype, what):
    """Every element within the dtype's tolerance of the row's size; NaN fails; infinities must agree."""
    expected = expected.double()
    actual = actual.double()
    assert actual.shape == expected.shape, what
    infinite = torch.isinf(expected)
    assert torch.equal(torch.isinf(actual), infinite), f"{what}: infinities differ"
    error = torch.where(infinite, 0.0, actual - torch.where(infinite, 0.0, expected))
    size = torch.where(infinite, 0.0, expected).abs().amax().clamp(min=1.0) if expected.numel() else 1.0
    largest = error.abs().amax().item() if error.numel() else 0.0
    assert largest <= TOLERANCE[dtype] * size, f"{what}: off by {largest}, size {size}"


def laid_out(r, tensor):
    """The same values in another layout: contiguous, a bhsd view, a slice of something wider, or a broadcast axis."""
    kind = r.choice(["contiguous", "contiguous", "bhsd", "slice", "packed", "batch", "heads"])
    if kind == "bhsd":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "slice":
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), torch.nan, dtype=tensor.dtype)
        wide[..., 2:-1] = tensor
        return wide[..., 2:-1]
    if kind == "packed":
        return torch.stack([tensor, torch.full_like(tensor, torch.nan)], dim=2)[:, :, 0]
    if kind == "batch":
        return tensor[:1].expand(tensor.shape)
    if kind == "heads":
        return tensor[:, :, :1].expand(tensor.shape)
    return tensor


def random_problem(seed):
    """A dict of arguments for flash_dmattn_func and a parallel one for truth()."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    heads_kv = r.choice([1, 2])
    heads = heads_kv * r.choice([1, 2, 3])
    batch, head_dim, head_dim_v = r.choice([1, 2, 3]), r.choice([1, 5, 16, 33, 64]), r.choice([1, 8, 24, 64])
    seqlen_q, seqlen_k = r.choice([1, 2, 7, 33, 70]), r.choice([1, 3, 17, 64, 90])
    dtype = r.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64])
    p = {
        "q": laid_out(r, torch.randn(batch, seqlen_q, heads, head_dim, dtype=dtype)),
        "k": laid_out(r, torch.randn(batch, seqlen_k, heads_kv, head_dim, dtype=dtype)),
        "v": laid_out(r, torch.randn(batch, seqlen_k, heads_kv, head_dim_v, dtype=dtype)),
        "mask": None,
        "bias": None,
        "intervals": None,
        "causal": r.random() < 0.4,
        "softcap": r.choice([0.0, 0.0, 3.0]),
        "window": r.choice([(-1, -1), (-1, -1), (5, 0), (3, 9), (-1, 2)]),
        "scale": r.choice([None, None, 0.3, -0.2, 0.0]),
    }

    def extents():
        return [r.choice([1, batch]), r.choice([1, heads_kv, heads]), r.choice([1, seqlen_q]), r.choice([1, seqlen_k])]

    if r.random() < 0.5:
        p["mask"] = torch.rand(extents()) < 0.7
    if r.random() < 0.6:
        p["bias"] = torch.randn(extents(), dtype=r.choice([dtype, torch.float32]) if dtype != torch.float64 else dtype)
    if r.random() < 0.3:
        shape = [r.choice([1, batch]), r.choice([1, heads_kv, heads]), seqlen_k]
        p["intervals"] = (
            torch.randint(-3, max(1, seqlen_q // 2), shape, dtype=torch.int32),
            torch.randint(0, seqlen_q + 5, shape, dtype=torch.int32),
        )
    return p


def call(function, p, **extra):
    """flash_dmattn_func with the arguments of a random_problem."""
    return function(
        p["q"],
        p["k"],
        p["v"],
        p["mask"],
        p["bias"],
        p["scale"],
        p["causal"],
        p["softcap"],
        window_size=p["window"],
        key_intervals=p["intervals"],
        **extra,
    )


@pytest.fixture(autouse=True)
def same_seed():
    torch.manual_seed(0)
