"""test_flops.py: torch.utils.flop_counter.FlopCounterMode counts the operators of attention."""

import pytest
import torch
from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, scaled_dot_product_attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

B, H, HKV, SQ, SK, D, DV = 2, 4, 2, 6, 10, 8, 16


def tensors(**keywords):
    shapes = (B, SQ, H, D), (B, SK, HKV, D), (B, SK, HKV, DV)
    return [torch.randn(shape, requires_grad=True, **keywords) for shape in shapes]


def counted(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_dense(causal, biased):
    q, k, v = tensors()
    bias = torch.zeros(1, 1, 1, SK, requires_grad=True) if biased else None
    forward = 2 * B * H * SQ * SK * (D + DV) // (2 if causal else 1)

    def call():
        return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=causal)

    with torch.no_grad():
        assert counted(call) == forward
    assert counted(lambda: call().sum().backward()) == forward * 3.5
    if not causal and not biased:
        same = tensors()[0]
        assert counted(lambda: flash_dmattn_func(same, same, same)) == 4 * B * H * SQ * SQ * D


def test_sdpa_counts_what_pytorchs_does():
    q, k, v = (each.transpose(1, 2) for each in tensors())
    ours = counted(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert ours == 2 * B * H * SQ * SK * (D + DV)


def test_packed():
    q, k, v = torch.randn(6, H, D), torch.randn(10, HKV, D), torch.randn(10, HKV, DV)
    cu_q, cu_k = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 7, 10], dtype=torch.int32)
    call = lambda *tensors: flash_dmattn_varlen_func(*tensors, 5, 8)
    assert counted(lambda: call(q, k, v, cu_q, cu_k)) == 2 * H * (2 * 7 + 4 * 3) * (D + DV)
    with FakeTensorMode() as mode:  # offsets that cannot be read: as long as sequences may be
        fake = [mode.from_tensor(each) for each in (q, k, v, cu_q, cu_k)]
        assert counted(lambda: call(*fake)) == 2 * H * 2 * (5 * 8) * (D + DV)
