"""vLLM's attention by flash_dmattn: `vllm serve MODEL --attention-backend CUSTOM`.

The package's entry point registers `Backend` where vLLM is installed. It was written against vLLM 0.33, and never run
inside vLLM: docs/engines.md says what was tested, and how.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Dict, List, Optional, Tuple, Type, Union

import torch
from torch import Tensor

try:
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
    from vllm.v1.attention.backend import (  # pyright: ignore[reportMissingImports]
        AttentionBackend,
        AttentionCGSupport,
        AttentionImpl,
        AttentionMetadata,
        AttentionMetadataBuilder,
        AttentionType,
        MultipleOf,
    )
except ImportError as error:
    raise ImportError(
        f"flash_dmattn.integrations.vllm needs vLLM 0.33, which cannot be imported here ({error}): pip install vllm"
    ) from error

from .._cache import append_kv_cache, flash_dmattn_with_kvcache_func
from .._torch import flash_dmattn_varlen_func
from ._engines import device_name, refusal

__all__ = ["Backend", "Impl", "Metadata", "MetadataBuilder"]

WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def _device() -> str:
    """The device of this platform where kernels serve caches there, else the CPU, whose plan says what exists at all."""
    capability = current_platform.get_device_capability()
    name = device_name(None if capability is None else (capability.major, capability.minor))
    return name if refusal(name, torch.float16, 64) is None else "cpu"


class Backend(AttentionBackend):
    """What vLLM asks before it takes flash_dmattn. Each answer is the plan's, or has a test.
    """

    supported_dtypes: ClassVar[List[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[List[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update: bool = False
    supports_kv_cache_update_bypass: bool = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> Type[MetadataBuilder]:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> List[Union[int, MultipleOf]]:
        # Pages of any size work; those of fewer keys are slower.
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return refusal(_device(), torch.float16, head_size) is None

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.supported_dtypes and refusal(_device(), dtype, 64) is None

    @classmethod
    def supports_sink(cls) -> bool:
        return refusal(_device(), torch.float16, 64, sink=True) is None

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (*WITHOUT_CACHE, AttentionType.DECODER, AttentionType.ENCODER_DECODER)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return refusal(device_name((capability.major, capability.minor)), torch.float16, 64) is None

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: Optional[int],
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> Optional[str]:
        if kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) is not dtype:
            return f"kv_cache_dtype is {kv_cache_dtype}, but the model's dtype is {dtype}: use auto"
        capability = None if device_capability is None else (device_capability.major, device_capability.minor)
        return refusal(device_name(capability), dtype, head_size, page=block_size or 16, sink=has_sink)


@dataclass
class Metadata(AttentionMetadata):
    """A step's requests, by references to vLLM's own tensors.

    Args:
        num_actual_tokens: rows of q that count.
        max_query_len, max_seq_len: bounds of a request's new tokens and of its keys.
        query_start_loc: int32 [B + 1]: where each request's rows begin.
        seq_lens: int32 [B]: keys of each request, those of this step included.
        block_table: int32 [B, columns].
        slot_mapping: int64 [tokens]: where the keys of this step go.
        causal: for all requests, or int32 or bool [B] for each.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: Union[bool, Tensor]


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Makes a step's metadata without work on the device: it allocates nothing and waits for nothing.

    Args:
        kv_cache_spec, layer_names, vllm_config, device: as vLLM gives them.

    Raises:
        NotImplementedError: build() is given ranges of images, or prefixes that all rows see.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    reorder_batch_threshold: Optional[int] = None
    supports_update_block_table: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        """The metadata of a step.

        Args:
            common_prefix_len: not looked at; vLLM gives 0.
            common_attn_metadata: of vLLM's CommonAttentionMetadata.
            fast_build: makes no difference.

        Returns:
            References to the tensors of common_attn_metadata.

        Raises:
            NotImplementedError: it has mm_req_doc_ranges or rswa_prefix_lens.
        """
        common = common_attn_metadata
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens"):
            if getattr(common, name) is not None:
                raise NotImplementedError(
                    f"{name} is given, but this backend makes no row intervals of it: use another attention backend"
                )
        return Metadata(
            common.num_actual_tokens,
            common.max_query_len,
            common.max_seq_len,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping,
            common.causal,
        )

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        """The same step for another group of layers.

        Args:
            metadata: of build().
            blk_table, slot_mapping: instead of its own.

        Returns:
            New metadata; `metadata` stays as it is.
        """
        return replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


def _refuse(name: str, value: Any, why: str) -> None:
    if value is not None:
        raise NotImplementedError(f"{name} is given, but {why}: use another attention backend")


class Impl(AttentionImpl[Metadata]):
    """The attention of one layer.

    Args:
        num_heads, head_size, num_kv_heads: H, D and Hkv of this rank.
        scale: the softmax scale.
        alibi_slopes: None.
        sliding_window: W: a row sees W keys, its own included; None: all.
        kv_cache_dtype: "auto", or the model's dtype.
        logits_soft_cap: cap of the scores; None or 0: none.
        attn_type: of vLLM's AttentionType.
        kv_sharing_target_layer_name: the layer whose cache this one reads; vLLM then writes no keys of its own.
        sinks: [H], a logit for each query head; None: none.

    Raises:
        NotImplementedError: ALiBi or a quantized cache is asked for.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: Optional[int] = None,
        alibi_slopes: Optional[List[float]] = None,
        sliding_window: Optional[int] = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: Optional[float] = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: Optional[str] = None,
        sinks: Optional[Tensor] = None,
    ) -> None:
        _refuse("alibi_slopes", alibi_slopes, "a call on a KV cache has no ALiBi")
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            raise NotImplementedError(f"kv_cache_dtype is {kv_cache_dtype}; flash_dmattn has no quantized caches: use auto")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes, self.kv_cache_dtype, self.attn_type = None, kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name, self.sinks = kv_sharing_target_layer_name, sinks
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.sliding_window: Tuple[int, int] = (-1, -1)
        if sliding_window is not None:
            self.sliding_window = sliding_window - 1, sliding_window - 1 if attn_type in WITHOUT_CACHE else 0
        self._options: Dict[str, Any] = {
            "softmax_scale": self.scale,
            "softcap": self.logits_soft_cap,
            "window_size": self.sliding_window,
            "sink": sinks,
        }

    def _pages(self, kv_cache: Tensor) -> Tuple[Tensor, Tensor]:
        """K and V, [pages, page size, Hkv, D], of vLLM's [pages, Hkv, page size, 2 D] in any layout."""
        rows = kv_cache.transpose(1, 2)
        return rows[..., : self.head_size], rows[..., self.head_size :]

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the keys and values of a step into the cache.

        Args:
            layer: not looked at.
            key, value: [tokens or more, Hkv, D].
            kv_cache: [pages, Hkv, page size, 2 D]; written.
            slot_mapping: int64 [tokens]; what is negative goes nowhere.

        Raises:
            TypeError, ValueError: as append_kv_cache.
        """
        if self.attn_type in WITHOUT_CACHE:
            return
        tokens = slot_mapping.shape[0]
        append_kv_cache(*self._pages(kv_cache), key[:tokens], value[:tokens], slots=slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Optional[Tensor],
        value: Optional[Tensor],
        kv_cache: Tensor,
        attn_metadata: Optional[Metadata],
        output: Tensor,
        output_scale: Optional[Tensor] = None,
        output_block_scale: Optional[Tensor] = None,
    ) -> Tensor:
        """Attention of a step's rows to the cache, or in encoders to each other.

        Args:
            layer: not looked at.
            query: [tokens or more, H, D].
            key, value: [tokens or more, Hkv, D]; looked at in encoders alone, as the cache holds them elsewhere.
            kv_cache: [pages, Hkv, page size, 2 D].
            attn_metadata: of MetadataBuilder.build(); None: a profiling run, which gives 0.
            output: [tokens or more, H, D]; its first num_actual_tokens rows are written. Rows of no request get 0.
            output_scale, output_block_scale: None.

        Returns:
            output.

        Raises:
            NotImplementedError: a scale of the output is given.
        """
        _refuse("output_scale", output_scale, "flash_dmattn gives no quantized output")
        _refuse("output_block_scale", output_block_scale, "flash_dmattn gives no quantized output")
        if attn_metadata is None:
            return output.fill_(0)
        step = attn_metadata
        q, out = query[: step.num_actual_tokens], output[: step.num_actual_tokens]
        if self.attn_type in WITHOUT_CACHE:
            assert key is not None and value is not None
            rows = step.query_start_loc, step.query_start_loc, step.max_query_len, step.max_query_len
            k, v = key[: step.num_actual_tokens], value[: step.num_actual_tokens]
            out.copy_(flash_dmattn_varlen_func(q, k, v, *rows, is_causal=False, **self._options))
            return output
        call: Dict[str, Any] = {
            "seqused_k": step.seq_lens,
            "block_table": step.block_table,
            "cu_seqlens_q": step.query_start_loc,
            "max_seqlen_q": step.max_query_len,
            "max_seqlen_k": step.max_seq_len,
            **self._options,
        }
        pages = self._pages(kv_cache)
        if not isinstance(step.causal, Tensor):
            flash_dmattn_with_kvcache_func(q, *pages, is_causal=bool(step.causal), out=out, **call)
            return output
        # Each request its own: those that are not of a call's kind have no rows in it, which get 0 there.
        counts = step.query_start_loc.diff()
        causal = step.causal.to(counts.dtype)
        flash_dmattn_with_kvcache_func(q, *pages, is_causal=True, seqused_q=counts * causal, out=out, **call)
        out += flash_dmattn_with_kvcache_func(q, *pages, is_causal=False, seqused_q=counts * (1 - causal), **call)
        return output
