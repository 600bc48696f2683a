"""test_mask_plan.py: mask plans: calls with one against the same masks given as such, and calls that refuse it."""

import gc

import pytest
import torch
from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, masks

BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM = 2, 150, 200, 4, 2, 16


def operands(rows=ROWS, keys=KEYS):
    q = torch.randn(BATCH, rows, HEADS, DIM, requires_grad=True)
    k, v = (torch.randn(BATCH, keys, HEADS_KV, DIM, requires_grad=True) for _ in range(2))
    return q, k, v


def results(given, **options):
    out = flash_dmattn_func(*given, **options)
    return out, *torch.autograd.grad(out.square().sum(), given)


def kinds_of_masks():
    start = torch.randint(0, 90, (1, HEADS_KV, 2, ROWS), dtype=torch.int32)
    intervals = torch.zeros(1, 1, KEYS, dtype=torch.int32), torch.randint(60, ROWS, (1, 1, KEYS), dtype=torch.int32)
    return [
        {"is_causal": True, "window_size": (90, None)},
        {"attn_mask": torch.rand(BATCH, 1, ROWS, KEYS) < 0.5},
        {"attn_mask": torch.rand(BATCH, KEYS) < 0.7, "is_causal": True},
        {"key_intervals": intervals, "is_causal": True},
        {"row_intervals": (start, start + 70), "block_mask": torch.rand(1, HEADS, 3, 4) < 0.7},
    ]


@pytest.mark.parametrize("kind", range(5))
def test_equal_to_its_masks(kind):
    given, options = operands(), kinds_of_masks()[kind]
    plan = masks.MaskPlan(*given[:2], **options)
    for have, want in zip(results(given, mask_plan=plan, softcap=3.0), results(given, softcap=3.0, **options)):
        assert torch.equal(have, want)
    assert list(options)[0] in repr(plan)


def test_packed_sequences():
    q, k, v = (torch.randn(230, heads, DIM) for heads in (HEADS, HEADS_KV, HEADS_KV))
    cu, blocks = torch.tensor([0, 80, 230], dtype=torch.int32), torch.rand(BATCH, 1, 3, 3) < 0.7
    options = {"is_causal": True, "block_mask": blocks}
    plan = masks.MaskPlan(q, k, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=150, max_seqlen_k=150, **options)
    have = flash_dmattn_varlen_func(q, k, v, cu, cu, 150, 150, mask_plan=plan)
    assert torch.equal(have, flash_dmattn_varlen_func(q, k, v, cu, cu, 150, 150, **options))


def test_other_calls_are_refused():
    q, k, v = (each.detach() for each in operands())
    plan = masks.MaskPlan(q, k, is_causal=True)
    with pytest.raises(ValueError, match="mask_plan was made for seqlen_q 150, but the call has 149"):
        flash_dmattn_func(q[:, 1:], k, v, mask_plan=plan)
    with pytest.raises(ValueError, match="mask_plan was made for heads 4, but the call has 2"):
        flash_dmattn_func(q[:, :, :2], k, v, mask_plan=plan)
    with pytest.raises(ValueError, match="attn_mask is given beside mask_plan"):
        flash_dmattn_func(q, k, v, torch.ones(BATCH, KEYS).bool(), mask_plan=plan)
    with pytest.raises(ValueError, match="is_causal is given beside mask_plan"):
        flash_dmattn_func(q, k, v, is_causal=False, mask_plan=plan)
    with pytest.raises(TypeError, match="mask_plan is .*; it must be a masks.MaskPlan"):
        flash_dmattn_func(q, k, v, mask_plan=3)
    with pytest.raises(TypeError, match="query is .*; it must be a torch.Tensor"):
        masks.MaskPlan(q.numpy(), k)


def test_a_backward_after_the_plan_is_refused():
    given = operands()
    plan = masks.MaskPlan(*given[:2], is_causal=True)
    out = flash_dmattn_func(*given, mask_plan=plan)
    del plan
    gc.collect()
    with pytest.raises(ValueError, match="the MaskPlan of this call is gone"):
        out.sum().backward()


def test_compiled():
    given = operands()
    plan = masks.MaskPlan(*given[:2], is_causal=True, block_mask=torch.rand(1, 1, 3, 4) < 0.7)
    compiled = torch.compile(flash_dmattn_func, fullgraph=True, backend="aot_eager")
    out = compiled(*given, mask_plan=plan)
    have = out, *torch.autograd.grad(out.square().sum(), given)
    for each, want in zip(have, results(given, mask_plan=plan)):
        torch.testing.assert_close(each, want)
