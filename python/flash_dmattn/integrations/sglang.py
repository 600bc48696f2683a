"""SGLang's attention by flash_dmattn: `python -m sglang.launch_server --model-path MODEL --attention-backend dmattn`.

The package's entry point registers the name where SGLang is installed. It was written against SGLang 0.5.23, and never
run inside SGLang: docs/engines.md says what was tested, and how.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor

try:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # pyright: ignore[reportMissingImports]
    from sglang.srt.layers.radix_attention import AttentionType  # pyright: ignore[reportMissingImports]
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        "flash_dmattn.integrations.sglang needs SGLang 0.5.23, which cannot be imported here "
        f"({error}): pip install sglang"
    ) from error

from .._cache import flash_dmattn_with_kvcache_func
from ._engines import device_name, refusal

__all__ = ["Backend", "Metadata"]


@dataclass
class Metadata:
    """A step's requests.

    Args:
        lengths: int32 [B]: keys of each request, those of this step included.
        table: int32, pages of each request, or with pages of one key SGLang's own table of all.
        requests: int32 [B]: each request's row of `table`; None: they are in order.
        offsets: int32 [B + 1]: where each request's rows begin; None: each has one.
        longest: the most new tokens of a request.
        window_table: `table` in the numbers of the pool that layers with windows have; None: there is none.
        window_slots: int64 [tokens]: where keys of this step go in that pool; None: there is none.
    """

    lengths: Tensor
    table: Tensor
    requests: Optional[Tensor]
    offsets: Optional[Tensor]
    longest: int
    window_table: Optional[Tensor] = None
    window_slots: Optional[Tensor] = None


def _check(runner: Any) -> None:
    """One sentence for what is not there."""
    translator = getattr(runner, "kv_index_translator", None)
    model = runner.model_config
    refused = {
        "multi-head latent attention": getattr(runner, "use_mla_backend", False),
        "cross attention": getattr(model, "is_encoder_decoder", False),
        "chunked local attention": getattr(model, "attention_chunk_size", None) is not None,
        "a unified pool of keys": translator is not None and translator.is_translating,
        "a quantized cache": runner.kv_cache_dtype is not runner.dtype,
    }
    for what, wanted in refused.items():
        if wanted:
            raise NotImplementedError(f"this model needs {what}, which flash_dmattn has not: use another attention backend")


class Backend(AttentionBackend):
    """The attention backend of one model runner.

    Args:
        model_runner: SGLang's; its pools, page size and device are asked.

    Raises:
        NotImplementedError: the model needs what flash_dmattn has not, or no kernel serves it on the device.
    """

    needs_cpu_seq_lens: bool = False  # SGLang then leaves lengths on the device
    forward_metadata: Optional[Metadata]

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        _check(model_runner)
        self.device = torch.device(model_runner.device)
        self.page_size = int(model_runner.page_size)
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.has_window_pool = hasattr(self.token_to_kv_pool, "translate_loc_from_full_to_swa")
        self.forward_metadata = None
        capability = None if self.device.type == "cpu" else torch.cuda.get_device_capability(self.device)
        reason = refusal(
            device_name(capability), model_runner.dtype, int(model_runner.model_config.head_dim), page=self.page_size
        )
        if reason is not None:
            raise NotImplementedError(reason)

    # ---- metadata ----------------------------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: metadata of a captured step are made inside the graph.

        Args:
            max_bs, max_num_tokens: not looked at.
        """

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of a request that fills a batch up.

        Returns:
            1.
        """
        return 1

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Makes the metadata of a step; operations of fixed shapes on the device, which a graph may record.

        Args:
            forward_batch: SGLang's batch: requests that generate, prompts or parts of them, or both.

        Raises:
            NotImplementedError: speculative decoding, or another mode of SGLang's.
        """
        batch, mode = forward_batch, forward_batch.forward_mode
        if mode.is_idle():
            return
        if batch.spec_info is not None or not (mode.is_decode() or mode.is_extend_or_draft_extend_or_mixed()):
            raise NotImplementedError(
                f"a step of mode {mode.name} is asked for; flash_dmattn serves decoding and prompts, without drafts: use "
                "another attention backend"
            )
        offsets, longest = None, 1
        if not mode.is_decode():
            counts = batch.extend_seq_lens
            offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
            on_host = batch.extend_seq_lens_cpu
            longest = int(batch.extend_num_tokens) if on_host is None else max(on_host)
        requests: Optional[Tensor] = batch.req_pool_indices.to(torch.int32)
        table, window_table, window_slots = self.req_to_token, None, None
        if self.page_size > 1 or self.has_window_pool:
            # The first slot of each page says which page it is.
            table, requests = table[batch.req_pool_indices, :: self.page_size], None
        if self.has_window_pool:
            window_table = self.token_to_kv_pool.translate_loc_from_full_to_swa(table).to(torch.int32) // self.page_size
            window_slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        if self.page_size > 1:
            table = table // self.page_size
        self.forward_metadata = Metadata(
            batch.seq_lens.to(torch.int32), table, requests, offsets, longest, window_table, window_slots
        )

    # ---- attention ---------------------------------------------------------------------------------------------------

    def _pages(self, layer: Any) -> Tuple[Tensor, Tensor]:
        """K and V of a layer, [pages, page size, Hkv, D]."""
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        whole = keys.shape[0] // self.page_size * self.page_size
        size = whole // self.page_size, self.page_size
        return keys[:whole].unflatten(0, size), values[:whole].unflatten(0, size)

    def _attend(
        self, q: Tensor, k: Any, v: Any, layer: Any, batch: Any, save: bool, sinks: Optional[Tensor], more: Dict[str, Any]
    ) -> Tensor:
        given = [name for name, value in more.items() if value is not None and value is not False]
        if given or layer.is_cross_attention or layer.attn_type is AttentionType.DECODER_BIDIRECTIONAL:
            what = given[0] if given else "another mask than a causal one"
            raise NotImplementedError(f"a layer gives {what}, which flash_dmattn has not: use another attention backend")
        if layer.logit_cap and layer.logit_capping_method != "tanh":
            raise NotImplementedError(f"logit_capping_method is {layer.logit_capping_method}; flash_dmattn has tanh alone")
        step = self.forward_metadata
        assert step is not None
        if save and k is not None:
            where = KVWriteLoc.for_batch(batch, swa_loc=step.window_slots)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        causal = layer.attn_type is not AttentionType.ENCODER_ONLY
        left = -1 if layer.sliding_window_size is None else layer.sliding_window_size  # W - 1
        windowed = left >= 0 and step.window_table is not None
        rows = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = flash_dmattn_with_kvcache_func(
            rows.unsqueeze(1) if step.offsets is None else rows,
            *self._pages(layer),
            seqused_k=step.lengths,
            block_table=step.window_table if windowed else step.table,
            cache_batch_idx=step.requests,
            cu_seqlens_q=step.offsets,
            max_seqlen_q=0 if step.offsets is None else step.longest,
            is_causal=causal,
            window_size=(left, 0 if causal else left),
            softmax_scale=layer.scaling,
            softcap=layer.logit_cap or 0.0,
            sink=sinks,
        )
        attended: Tensor = out.reshape(q.shape[0], -1)
        return attended

    def forward_decode(
        self,
        q: Tensor,
        k: Optional[Tensor],
        v: Optional[Tensor],
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Optional[Tensor] = None,
        **more: Any,
    ) -> Tensor:
        """Attention of one row of each request.

        Args:
            q: [B, H D].
            k, v: [B, Hkv, D]; None: the cache has them.
            layer: SGLang's; its heads, window, cap and scale are asked.
            forward_batch: the batch of the last metadata.
            save_kv_cache: k and v are written into the cache before.
            sinks: [H], a logit for each query head.
            more: what else a layer gives: nothing but None and False is taken.

        Returns:
            [B, H Dv].

        Raises:
            NotImplementedError: the layer gives what flash_dmattn has not.
        """
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, more)

    def forward_extend(
        self,
        q: Tensor,
        k: Optional[Tensor],
        v: Optional[Tensor],
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Optional[Tensor] = None,
        **more: Any,
    ) -> Tensor:
        """Attention of the rows of prompts, or of parts of them, and of single rows beside them.

        Args:
            q: [T, H D]; the others as of forward_decode().

        Returns:
            [T, H Dv].

        Raises:
            NotImplementedError: the layer gives what flash_dmattn has not.
        """
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, more)
