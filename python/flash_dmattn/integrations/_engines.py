"""What the plug-ins of inference engines share: the plan of a step, asked for by its facts."""

from __future__ import annotations

import functools
from typing import Optional, Tuple

import torch

from .. import _native

# Rows of a request in a step that generates, and in one that reads a prompt.
ROWS = (1, 256)


def device_name(capability: Optional[Tuple[int, int]]) -> str:
    """The name that the library has for a device of a compute capability; None: the CPU."""
    return "cpu" if capability is None else f"sm_{capability[0]}{capability[1]}"


@functools.lru_cache(maxsize=None)
def refusal(
    device: str, dtype: torch.dtype, head_dim: int, heads: int = 8, heads_kv: int = 1, page: int = 16, sink: bool = False
) -> Optional[str]:
    """Why no kernel serves requests of these facts on a device, which need not be here; None where kernels do.

    Args:
        device: its name, of device_name().
        dtype: of q and of the cache.
        head_dim: D, of K and V.
        heads, heads_kv: H and Hkv.
        page: keys of a page.
        sink: the model has learnable sinks.
    """
    name = str(dtype).removeprefix("torch.")
    for rows in ROWS:
        try:
            _native.plan_cache(device, name, rows, heads, heads_kv, head_dim, page, int(sink), 0.0, True, -1)
        except (NotImplementedError, ValueError) as error:
            return str(error)
    return None
