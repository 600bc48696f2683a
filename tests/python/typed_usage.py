"""typed_usage.py: every public function as a typed program calls it. mypy and pyright read it, a test runs it."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple, Union

import numpy
import torch
from flash_dmattn import (
    TunedWay,
    __version__,
    attention,
    attention_backward,
    bench,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
    gemm,
    get_available_backends,
    masks,
    merge,
    scaled_dot_product_attention,
    softmax,
    tune,
    tune_gemm,
    tune_softmax,
)
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from typing_extensions import assert_type


def torch_functions(flag: bool) -> None:
    q, k, v = torch.randn(3, 1, 6, 2, 8).unbind()
    assert_type(flash_dmattn_func(q, k, v, is_causal=True, window_size=(2, None)), Tensor)
    assert_type(flash_dmattn_func(q, k, v, return_lse=True), Tuple[Tensor, Tensor])
    ids, windows = torch.zeros(1, 6, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    assert_type(flash_dmattn_func(q, k, v, document_ids=ids, window_size=windows), Tensor)
    assert_type(masks.rule_intervals(ids, window_sizes=windows), masks.KeyIntervals)
    assert_type(flash_dmattn_func(q, k, v, return_lse_low=True), Tuple[Tensor, Tensor, Optional[Tensor]])
    assert_type(flash_dmattn_func(q, k, v, return_attn_probs=True), Tuple[Tensor, Tensor, Tensor])
    assert_type(flash_dmattn_func(q, k, v, return_lse=flag), Any)
    assert_type(flash_dmattn_func_auto("cpu", is_causal=True)(q, k, v), Any)
    assert_type(scaled_dot_product_attention(q, k, v, scale=0.5), Tensor)

    cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)
    packed = q[0], k[0], v[0], cu_seqlens, cu_seqlens, 4, 4
    assert_type(flash_dmattn_varlen_func(*packed, is_causal=True), Tensor)
    assert_type(flash_dmattn_varlen_func(*packed, return_lse=True), Tuple[Tensor, Tensor])

    first = flash_dmattn_func(q, k[:, :2], v[:, :2], return_lse=True)
    rest = flash_dmattn_func(q, k[:, 2:], v[:, 2:], return_lse=True)
    assert_type(merge(*first, *rest), Tuple[Any, ...])


def mask_functions() -> None:
    q, k, v = torch.randn(3, 1, 6, 2, 8).unbind()
    bias = masks.key_bias(torch.randn(1, 6, 2), torch.ones(2), exponential=True)
    intervals = masks.topk_intervals(bias, 4)
    assert_type(intervals, masks.KeyIntervals)
    assert_type(intervals.seqlen_q, Optional[int])
    flash_dmattn_func(q, k, v, attn_bias=bias[:, :, None], is_causal=True, key_intervals=intervals)
    for each in (
        masks.causal_intervals(6, 6),
        masks.window_intervals(6, 6, (2, None), causal=True, library="torch", device="cpu"),
        masks.prefix_intervals(6, 6, 2),
        masks.document_intervals(torch.tensor([0, 2, 6], dtype=torch.int32)),
    ):
        assert_type(each, masks.KeyIntervals)
        dense = masks.intervals_to_mask(*each, 6)
        assert_type(masks.intervals_from_mask(dense), Optional[masks.KeyIntervals])
        masks.mask_blocks(dense, 2, 2)
    blocks = masks.blocks_from_lists(torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int(), 1)
    flash_dmattn_func(q, k, v, mask_plan=masks.MaskPlan(q, k, is_causal=True))
    flash_dmattn_func(q, k, v, block_mask=blocks, row_intervals=masks.rule_row_intervals(torch.zeros(1, 6).int()))
    start, end = masks.from_flex_ranges(torch.ones(1, 1, 6).int())
    flex = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 6, 6, device="cpu")
    assert_type(flash_dmattn_func(q, k, v, row_intervals=(start, end), **masks.from_block_mask(flex)), Any)
    masks.create_mask(bias[:, :, None], None, 1, 6, 6, 4, -1e9, block_size=2, type="topk")
    state = masks.TopKState.of_prompt(bias, 4, k, v)
    assert_type(state, masks.TopKState)
    state.append(bias[..., 0], k[:, :1], v[:, :1])


def array_functions() -> None:
    q = numpy.ones((1, 6, 2, 8), numpy.float32)
    out, lse = attention(q, q, q, is_causal=True, return_lse=True)
    assert_type(attention_backward(out, q, q, q, out, lse, is_causal=True), Tuple[Any, ...])


def cuda_functions() -> None:
    a = torch.ones(8, 8, dtype=torch.float16, device="cuda")
    gemm(a, a, a, alpha=0.5, beta=2.0)
    softmax(a, None, 0.5, log=True)


def cache_functions() -> None:
    from flash_dmattn import append_kv_cache, flash_dmattn_with_kvcache_func

    k, v = torch.zeros(2, 3, 4, 2, 8)  # 3 pages of 4 keys
    new, length = torch.ones(1, 1, 2, 8), torch.tensor([5], dtype=torch.int32)
    table, rotary = torch.tensor([[2, 0]]), (torch.ones(8, 4), torch.zeros(8, 4))
    append_kv_cache(k, v, new, new, cache_seqlens=length, block_table=table, rotary=rotary, query=new)
    flash_dmattn_with_kvcache_func(
        new, k, v, new, new, cache_seqlens=length, block_table=table, rotary=rotary, return_lse=True
    )


def jax_functions() -> None:
    import jax.numpy as jnp
    from flash_dmattn.jax import attention as jax_attention

    q = jnp.ones((1, 4, 2, 8))
    jax_attention(q, q, q, is_causal=True, return_lse=True)


def transformers_functions() -> None:
    from flash_dmattn.integrations.doge import DogeIntervalAttention, use_key_intervals
    from flash_dmattn.integrations.transformers import CausalMask, dmattn_mask, flash_dmattn_attention_forward
    from transformers import DogeConfig, DogeForCausalLM

    mask = dmattn_mask(1, 4, 4)
    assert isinstance(mask, CausalMask) and mask.dense().all(-1).sum() == 1
    q = torch.ones(1, 2, 4, 8)
    assert_type(flash_dmattn_attention_forward(torch.nn.Module(), q, q, q, mask), Tuple[Tensor, None])
    config = DogeConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = use_key_intervals(DogeForCausalLM(config))
    assert any(isinstance(each, DogeIntervalAttention) for each in model.modules())


def engine_functions() -> None:
    """What entry points name; an engine calls them where it is installed."""
    from flash_dmattn.integrations import register_sglang, register_vllm

    for register in (register_sglang, register_vllm):
        try:
            assert_type(register(), None)
        except ImportError:
            pass


def names_of_flash_attn() -> None:
    from flash_dmattn.compat import flash_attn, flash_attn_cute, flash_attn_interface, install, uninstall
    from flash_dmattn.compat.varlen import varlen_attn

    q, k, v = torch.randn(3, 1, 6, 2, 8).unbind()
    offsets, length = torch.tensor([0, 2, 6], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    packed = q[0], k[0], v[0], offsets, offsets, 4, 4
    flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(2, 0), return_attn_probs=True)
    flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), alibi_slopes=torch.rand(2))
    flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2))
    flash_attn.flash_attn_varlen_func(*packed, causal=True)
    flash_attn.flash_attn_varlen_kvpacked_func(q[0], torch.stack([k[0], v[0]], 1), offsets, offsets, 4, 4)
    flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack(packed[:3], 1), offsets, 4)
    flash_attn.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=length)
    assert flash_attn.flash_attn_interface.flash_attn_func is flash_attn.flash_attn_func
    flash_attn_interface.flash_attn_func(q, k, v, attention_chunk=4)
    flash_attn_interface.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2))
    flash_attn_interface.flash_attn_varlen_func(*packed)
    flash_attn_interface.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=length, num_splits=0)
    flash_attn_interface.get_scheduler_metadata(1, 1, 6, 2, 2, 8, length)
    flash_attn_interface.flash_attn_combine(torch.randn(2, 1, 6, 2, 8), torch.randn(2, 1, 6, 2))
    assert_type(flash_attn_cute.flash_attn_func(q, k, v, return_lse=True), Tuple[Tensor, Optional[Tensor]])
    assert_type(
        flash_attn_cute.flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens_q=offsets, cu_seqlens_k=offsets),
        Tuple[Tensor, Optional[Tensor]],
    )
    parts = torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2)
    assert_type(flash_attn_cute.flash_attn_combine(*parts), Tuple[Tensor, Optional[Tensor]])
    assert_type(varlen_attn(*packed, window_size=(-1, 0)), Union[Tensor, Tuple[Tensor, Tensor]])
    install((2, 3), replace=True)
    uninstall()


def ranks() -> None:
    import torch.distributed as dist
    from flash_dmattn.context_parallel import ContextParallel, Layout, Mask, RemoteError
    from flash_dmattn.integrations.transformers import enable_context_parallel, rank_inputs
    from transformers import LlamaConfig, LlamaForCausalLM

    layout = Layout.balanced([Mask(is_causal=True)], 1, total=256)
    assert_type(layout.imbalance(Mask(window_size=(64, 0))), float)
    store: Any = getattr(dist, "HashStore")()  # which type checkers do not see
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = ContextParallel(layout)
        q = torch.randn(1, 256, 2, 8)
        assert_type(layout.shard(q, 1, 0), Tensor)
        out: Tensor = group.flash_dmattn_func(q, q, q, is_causal=True)
        assert_type(layout.unshard(out, 1), Tensor)
        assert_type(group.positions(), Tensor)
        offsets = torch.tensor([0, 100, 256], dtype=torch.int32)
        group.flash_dmattn_varlen_func(q[0], q[0], q[0], offsets, offsets, is_causal=True)
        assert group.explain()["rows"] == [256]
        tokens = torch.zeros(1, 256, dtype=torch.int64)
        config = LlamaConfig(
            vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        model = LlamaForCausalLM(config)
        model.set_attn_implementation("dmattn")
        enable_context_parallel(model, group)
        assert_type(rank_inputs(group, tokens, tokens), Dict[str, Any])
        model(**rank_inputs(group, tokens, tokens))
    except RemoteError:  # another rank's error
        raise
    finally:
        dist.destroy_process_group()


def tuning() -> None:
    shape = (1, 16, 1, 8)
    found = tune(shape, shape, dtype="float32", device="cpu", seconds=0.01, keep=False)
    assert_type(found, "tuple[int, list[TunedWay]]")
    assert_type(found[1][0].is_rule, bool)
    try:
        assert_type(tune_gemm(64, 64, 64, seconds=0.01, keep=False), "tuple[int, list[TunedWay]]")
        assert_type(tune_softmax(64, 64, seconds=0.01, keep=False), "tuple[int, list[TunedWay]]")
    except (NotImplementedError, RuntimeError, ValueError):  # no CUDA device is here
        pass


def main() -> None:
    assert_type(__version__, str)
    assert_type(get_available_backends(), "list[str]")
    torch_functions(True)
    mask_functions()
    array_functions()
    cache_functions()
    jax_functions()
    transformers_functions()
    engine_functions()
    names_of_flash_attn()
    ranks()
    tuning()
    assert bench.main(["--root", "no/such/folder"]) == 2
    if torch.cuda.is_available():
        cuda_functions()


if __name__ == "__main__":
    main()
