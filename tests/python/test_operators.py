"""test_operators.py: the torch.library operators: opcheck, torch.compile, dispatch modes, export."""

import pytest
import torch
from conftest import assert_close, call, random_problem, truth
from flash_dmattn import _arguments, _fields, flash_dmattn_func, flash_dmattn_varlen_func, masks

NO_EXTRAS = (None,) * (len(_fields.INPUTS) - 3)
SETTINGS = (0, 0, None, True, 0.0, -1, -1, False, False, 0)


def inputs(**keywords):
    torch.manual_seed(0)
    shapes = ((2, 6, 4, 8), (2, 7, 2, 8), (2, 7, 2, 5))
    return [torch.randn(shape, requires_grad=True, **keywords) for shape in shapes]


def test_settings_lie_in_the_order_of_the_extension():
    settings = _arguments.settings_of(0.5, None, True, 2.0, True, (3, 4), 5, 6, True)
    assert dict(zip(_fields.SETTING, settings, strict=True)) == {
        "max_seqlen_q": 5, "max_seqlen_k": 6, "softmax_scale": 0.5, "causal": True, "softcap": 2.0, "window_left": 3,
        "window_right": 4, "deterministic": True, "lse_without_sink": True, "mask_plan": 0,
    }


def test_opcheck_forward():
    q, k, v = inputs()
    bias = torch.randn(1, 2, 1, 7, requires_grad=True)
    mask = torch.rand(2, 1, 6, 7) < 0.8
    operator = torch.ops.flash_dmattn.forward.default
    torch.library.opcheck(operator, (q, k, v, *NO_EXTRAS, *SETTINGS))
    torch.library.opcheck(operator, (q, k, v, mask, bias, *NO_EXTRAS[2:], 0, 0, 0.3, True, 2.0, 3, -1, True, False, 0))
    torch.library.opcheck(
        operator, (q.detach().transpose(1, 2).contiguous().transpose(1, 2), k, v, *NO_EXTRAS, *SETTINGS)
    )


def test_opcheck_forward_beside_bias():
    q, k, v = inputs()
    bias = torch.randn(1, 2, 1, 7, requires_grad=True)
    operator = torch.ops.flash_dmattn.forward_beside_bias.default
    torch.library.opcheck(operator, (q, k, v, None, bias, *NO_EXTRAS[2:], *SETTINGS))
    tensors = [tensor.detach() for tensor in (q, k, v)]
    given = (*tensors, None, bias.detach(), *NO_EXTRAS[2:])
    out, lse, low = operator(*given, *SETTINGS)
    needs = (True, True, True, True, False)
    torch.library.opcheck(
        torch.ops.flash_dmattn.backward.default, (*given, out, lse, out, lse, *needs, *SETTINGS), {"lse_low": low}
    )


def test_opcheck_forward_packed():
    q, k, v = (tensor[0] for tensor in inputs())
    cu_q, cu_k = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([0, 5, 7], dtype=torch.int32)
    settings = (4, 5, *SETTINGS[2:])
    torch.library.opcheck(torch.ops.flash_dmattn.forward.default, (q, k, v, *NO_EXTRAS[:4], cu_q, cu_k, *NO_EXTRAS[6:], *settings))


def test_opcheck_backward():
    q, k, v = (tensor.detach() for tensor in inputs())
    out, lse = torch.ops.flash_dmattn.forward(q, k, v, *NO_EXTRAS, *SETTINGS)
    operator = torch.ops.flash_dmattn.backward.default
    for needs in ((True, True, True, False, False), (False, True, False, False, False)):
        torch.library.opcheck(operator, (q, k, v, *NO_EXTRAS, out, lse, out, lse, *needs, *SETTINGS))


def test_opcheck_topk_intervals():
    padding = torch.rand(2, 9) < 0.8
    operator = torch.ops.flash_dmattn.topk_intervals.default
    torch.library.opcheck(operator, (torch.randn(1, 2, 9), padding, 3, 9))
    torch.library.opcheck(operator, (torch.randn(2, 1, 9), None, 3, 4))


@pytest.mark.parametrize("seed", [0, 3, 5, 11])
def test_operator_agrees_with_the_direct_way(seed):
    p = random_problem(seed)
    direct = call(flash_dmattn_func, p)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        through_operator = call(flash_dmattn_func, p)
    assert torch.equal(direct, through_operator)
    assert any(event.key == "flash_dmattn::forward" for event in profile.key_averages())


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic):
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def layer(q, k, v, bias):
        start, end = masks.topk_intervals(bias, 3, q.shape[1])
        out, lse = flash_dmattn_func(
            q * 2, k, v, attn_bias=bias, is_causal=True, key_intervals=(start, end), return_lse=True
        )
        return out.square().sum() + lse[torch.isfinite(lse)].sum() * 0 + out.sum()

    for length in (7, 9):
        q, k, v = (torch.randn(2, length, heads, 8, requires_grad=True) for heads in (4, 2, 2))
        bias = torch.randn(2, 2, length, requires_grad=True)
        layer(q, k, v, bias).backward()
        exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v, bias)]
        pair = masks.topk_intervals(bias, 3, length)
        out = truth(exact[0] * 2, exact[1], exact[2], None, exact[3][:, :, None], causal=True, intervals=pair)[0]
        (out.square().sum() + out.sum()).backward()
        for ours, true in zip((q, k, v, bias), exact):
            assert_close(ours.grad, true.grad, torch.float32, "gradient")


def test_compile_fullgraph_packed_under_autocast():
    torch._dynamo.reset()
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q):
        with torch.autocast("cpu", torch.bfloat16):
            return flash_dmattn_varlen_func(q, q, q, cu, cu, 4, 4, is_causal=True)

    q = torch.randn(6, 2, 8, requires_grad=True)
    out = layer(q)
    assert out.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(out, flash_dmattn_varlen_func(q, q, q, cu, cu, 4, 4, is_causal=True))
    out.float().sum().backward()
    assert q.grad.shape == q.shape


def test_compile_without_gradients():
    torch._dynamo.reset()
    q = torch.randn(1, 5, 2, 8)
    compiled = torch.compile(lambda t: flash_dmattn_func(t, t, t, return_lse=True), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for ours, direct in zip(compiled(q), flash_dmattn_func(q, q, q, return_lse=True)):
            assert torch.equal(ours, direct)


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q):
            return flash_dmattn_func(q, q, q, is_causal=True)

    q = torch.randn(1, 5, 2, 8)
    program = torch.export.export(Model(), (q,))
    assert "flash_dmattn.forward" in str(program.graph)
    assert torch.equal(program.module()(q), flash_dmattn_func(q, q, q, is_causal=True))


def test_meta_tensors_give_shapes():
    q, k = torch.empty(2, 5, 4, 8, device="meta"), torch.empty(2, 7, 2, 8, device="meta")
    out, lse = flash_dmattn_func(q, k, k, return_lse=True)
    assert out.device.type == "meta" and out.shape == q.shape and lse.shape == (2, 4, 5)


def test_second_derivative_of_the_operator_is_refused():
    q, k, v = inputs()
    out, _ = torch.ops.flash_dmattn.forward(q, k, v, *NO_EXTRAS, *SETTINGS)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()
