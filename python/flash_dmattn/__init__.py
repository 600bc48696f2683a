"""Exact attention with any mask, forward and backward, on the CPU and on CUDA devices.

    from flash_dmattn import flash_dmattn_func          # PyTorch: autograd, torch.compile, autocast
    out = flash_dmattn_func(query, key, value, attn_mask=mask, attn_bias=bias, is_causal=True)

    from flash_dmattn import attention                  # NumPy, CuPy and anything with DLPack; needs no torch
    out = attention(q, k, v, is_causal=True)

Tensors are [batch, seqlen, heads, head_dim]; `bhsd` tensors work as views (`x.transpose(1, 2)`), without a copy, and
`scaled_dot_product_attention` takes them as PyTorch's function of that name does.
`flash_dmattn.masks` builds masks, `python -m flash_dmattn.bench` measures against PyTorch's own attention.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

try:
    from . import _native
except ImportError as error:
    raise ImportError(
        f"the compiled part of flash_dmattn cannot be loaded here ({error}); "
        "`pip install --force-reinstall flash-dmattn` takes the one for this system"
    ) from error
from ._arrays import attention, attention_backward
from ._cache import append_kv_cache, flash_dmattn_with_kvcache_func
from ._gemm import gemm
from ._merge import merge
from ._softmax import softmax
from ._tune import TunedWay, tune, tune_gemm, tune_softmax

if TYPE_CHECKING:  # what __getattr__ imports
    from . import masks
    from ._sdpa import scaled_dot_product_attention
    from ._torch import flash_dmattn_func, flash_dmattn_func_auto, flash_dmattn_varlen_func

__version__: str = _native.version()
__all__ = [
    "TunedWay",
    "append_kv_cache",
    "attention",
    "attention_backward",
    "flash_dmattn_func",
    "flash_dmattn_func_auto",
    "flash_dmattn_varlen_func",
    "flash_dmattn_with_kvcache_func",
    "gemm",
    "get_available_backends",
    "masks",
    "merge",
    "scaled_dot_product_attention",
    "softmax",
    "tune",
    "tune_gemm",
    "tune_softmax",
]

_TORCH_NAMES = {
    "flash_dmattn_func": "._torch",
    "flash_dmattn_varlen_func": "._torch",
    "flash_dmattn_func_auto": "._torch",
    "scaled_dot_product_attention": "._sdpa",
}


def get_available_backends() -> list[str]:
    """The back ends that this installation can run, best first. Starts the CUDA driver where there is one.

    Returns:
        ["cuda", "cpu"], or ["cpu"] where no CUDA device can be used.

    Raises:
        Nothing: a driver that does not start counts as no device.

    Examples:
        >>> from flash_dmattn import get_available_backends
        >>> get_available_backends()[-1]
        'cpu'
    """
    return ["cuda", "cpu"] if _native.cuda_devices() else ["cpu"]


def __getattr__(name: str) -> Any:
    if name == "masks":
        return importlib.import_module(".masks", __name__)
    if name not in _TORCH_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ImportError(f"{name} needs PyTorch; without it, flash_dmattn.attention takes NumPy arrays") from None
    return _load_torch(name)


def _load_torch(name: str) -> Any:
    for module in ("._torch", "._merge_torch", "._masks_torch", "._cache_torch", "._softmax_torch", "._gemm_torch", "._flops"):
        importlib.import_module(module, __name__)
    for each, module in _TORCH_NAMES.items():
        globals()[each] = getattr(importlib.import_module(module, __name__), each)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Programs that were exported or compiled with the operators need them; torch is never imported for that alone.
if hasattr(sys.modules.get("torch"), "library"):
    _load_torch("flash_dmattn_func")
