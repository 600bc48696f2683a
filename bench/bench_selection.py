"""The backward's selection beside one fixed rule, on a CUDA device: the contenders of the benchmark's set "selection".

Each contender is the library itself with a plan of its own, made for a device of a name (its architecture, with less shared
memory where the name says so) and forced to a choice code or not:

    flash_dmattn   what is chosen here
    low memory     one configuration that fits every device, with the 99 KB that every device has: V in registers
    V shared       the same tile with V in shared memory, where that fits 99 KB
    old rule       the tile that a rule by shared memory alone would take, and every buffer that this library adds to it
    old rule bare  the same tile with the shared memory that the tile itself needs, and no more

and, in the set "tiles", every tile of the backward that exists at the head dim, with the device's own memory.
"""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

from flash_dmattn import _native, flash_dmattn_func
from flash_dmattn._fields import TENSORS
from flash_dmattn._operators import allocator_of, native_view, stream_of

from bench_peers import Problem
from bench_report import OURS

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
EVERY_DEVICE = ":smem=99K"  # what 8.6, 8.9 and 12.0 have; every other device has more


class Choice(NamedTuple):
    """A plan's wish: memory is a device name's suffix, kernel a choice code; None: the device's own, a free choice."""

    memory: Optional[str] = None
    kernel: Optional[str] = None


LOW_MEMORY = {
    32: "SM90_MediumBlock_64x128_VinRegs",
    64: "SM90_MediumBlock_64x128_VinRegs",
    128: "SM90_LowMem_64x64_VinRegs",
    192: "SM90_LowMem_64x64_VinRegs",
    256: "SM90_LowMem_64x32_VinRegs",
}
V_SHARED = {64: "SM90_MediumBlock_64x128", 128: "SM90_SmallBlock_64x64", 256: None}
OLD_RULE = {
    64: ("SM90_LargeBlock_128x128", {32: 49, 64: 81}),
    128: ("SM90_MediumBlock_64x128", {96: 89, 128: 97}),
    256: ("SM90_SmallBlock_64x64", {192: 137, 256: 177}),
}
TILES = (
    "SM90_LargeBlock_128x128", "SM90_LargeBlock_128x128_VinRegs", "SM90_MediumBlock_64x128",
    "SM90_MediumBlock_64x128_VinRegs", "SM89_LongSeq_128x64", "SM89_LongSeq_128x64_VinRegs", "SM90_SmallBlock_64x64",
    "SM90_LowMem_64x64_VinRegs", "SM90_LowMem_64x32_VinRegs",
)  # fmt: skip


def _row(table: Dict[int, Any], head_dim: int) -> Any:
    return next(value for most, value in table.items() if head_dim <= most)


def contenders(name: str, head_dim: int) -> Dict[str, Choice]:
    """Of the set of that name."""
    if name == "tiles":
        return {OURS: Choice(), **{code: Choice(None, code) for code in TILES}}
    old, own_memory = _row(OLD_RULE, head_dim)
    v_shared = _row(V_SHARED, head_dim)
    return {
        OURS: Choice(),
        "low memory": Choice(EVERY_DEVICE, _row(LOW_MEMORY, head_dim)),
        **({"V shared": Choice(EVERY_DEVICE, v_shared)} if v_shared else {}),
        "old rule": Choice(None, old),
        "old rule bare": Choice(f":smem={_row(own_memory, head_dim)}K", old),
    }


def shapes(name: str) -> Iterator[Tuple[int, int, int]]:
    """(batch, columns of all heads together, sequence length): batch 1 and larger, short to long."""
    if name == "tiles":
        yield from ((1, 2048, 1024), (16, 2048, 1024), (1, 2048, 4096), (2, 2048, 8192))
        return
    for seqlen in (1024, 4096, 8192, 16384):
        yield 1, 2048, seqlen
        yield (16384 // seqlen, 2048, seqlen) if seqlen < 16384 else (2, 1024, seqlen)


def run_as(device: Optional[str], kernel: Optional[str], tensors: Dict[str, Optional[torch.Tensor]], causal: bool = False,
           softcap: float = 0.0, deterministic: bool = False) -> Dict[str, Any]:
    """Runs a pass by the plan for the device of that name (None: the tensors' own) and kernel (None: chosen); the plan.

    tensors: by their names in fdm_tensors; a backward where dout is one of them."""
    q = tensors.get("q")
    stream, allocate = (stream_of(q), allocator_of(q)) if q is not None and q.is_cuda else (0, None)
    given = [None] * len(TENSORS)
    for name, tensor in tensors.items():
        given[TENSORS.index(name)] = native_view(tensor)
    return json.loads(_native.run_as(device, kernel, tuple(given), causal, softcap, stream, allocate, deterministic))


class Runner:
    """One contender's backward on the tensors of a problem. plan: what ran last."""

    def __init__(self, choice: Choice, problem: Problem, arch: Optional[str], saved: List[torch.Tensor]) -> None:
        self.choice, self.problem, self.saved = choice, problem, saved
        self.device = arch + choice.memory if choice.memory and arch else None
        self._plan: Dict[str, Any] = {}

    def __call__(self) -> Tuple[torch.Tensor, ...]:
        p = self.problem
        inputs = {"q": p.q.detach(), "k": p.k.detach(), "v": p.v.detach()}
        gradients = {f"d{name}": torch.empty_like(tensor) for name, tensor in inputs.items()}
        tensors = inputs | dict(zip(("out", "lse", "dout"), self.saved)) | gradients
        self._plan = run_as(self.device, self.choice.kernel, tensors, p.causal)
        return tuple(gradients.values())

    @property
    def plan(self) -> Dict[str, Any]:
        return {name: self._plan[name] for name in ("choice", "stages", "shared_bytes", "reason")} | {"device": self.device}


def arch_of(device: torch.device) -> Optional[str]:
    """The name that a pretended device of this one's architecture has; None on the CPU."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else None


def runners(name: str, problem: Problem) -> Dict[str, Callable[[], Any]]:
    """Calls of the set's contenders, of those that exist."""
    with torch.no_grad():
        out, lse = flash_dmattn_func(problem.q, problem.k, problem.v, is_causal=problem.causal, return_lse=True)
    generator = torch.Generator(out.device).manual_seed(1)
    saved = [out, lse, torch.randn(out.shape, dtype=out.dtype, device=out.device, generator=generator)]
    arch = arch_of(out.device)
    calls: Dict[str, Callable[[], Any]] = {}
    for contender, choice in contenders(name, problem.q.shape[-1]).items():
        call = Runner(choice, problem, arch, saved)
        try:
            call()
        except (NotImplementedError, ValueError):  # the tile does not exist at this head dim, or does not fit
            if name != "tiles":
                raise
            continue
        calls[contender] = call
    return calls
