"""One attention over several ranks, forward and backward, under any mask: context parallelism by torch.distributed.

    from flash_dmattn.context_parallel import ContextParallel, Layout
    layout = Layout.zigzag(seqlen, ranks)                       # which rows lie where
    cp = ContextParallel(layout, group)                         # collective
    out = cp.flash_dmattn_func(q, k, v, is_causal=True)         # of this rank's rows; masks count global positions

The process group moves the bytes: gloo for tensors on the CPU, NCCL for CUDA tensors.
"""

from __future__ import annotations

from ._agree import RemoteError
from ._visible import Mask
from .layout import Layout
from .parallel import ContextParallel

__all__ = ["ContextParallel", "Layout", "Mask", "RemoteError"]
