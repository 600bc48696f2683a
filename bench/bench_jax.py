"""The benchmark's cells in JAX: `flash_dmattn.jax.attention` beside `jax.nn.dot_product_attention`, each compiled by
jax.jit(). A pass is a forward, or a training step: the forward and the gradients of q, k and v."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional

import jax
import jax.numpy as jnp
import torch

from flash_dmattn.jax import attention

import bench_attention as bench

Attend = Callable[[Any, Any, Any], Any]
STEP = "step"  # costs what a forward and a backward cost
VERSIONS = {"jax": jax.__version__, "jax_device": jax.devices()[0].device_kind}


@dataclass
class Inputs:
    """[B, S, H, D] arrays of a cell; peer_mask is added to the peer's scores."""

    q: Any
    k: Any
    v: Any
    dout: Any
    mask: Any
    bias: Any
    intervals: Any
    peer_mask: Any


def array_of(tensor: Optional[torch.Tensor]) -> Any:
    return None if tensor is None else jax.device_put(jnp.from_dlpack(tensor.contiguous()), jax.devices()[0])


def inputs_of(p: bench.Problem) -> Inputs:
    rows = (array_of(tensor.transpose(1, 2)) for tensor in (p.q, p.k, p.v, p.dout))
    pair = p.intervals and tuple(map(array_of, p.intervals))
    return Inputs(*rows, array_of(p.mask), array_of(p.bias), pair, array_of(p.peer_mask))


def contenders_of(cell: bench.Cell, x: Inputs) -> Dict[str, Attend]:
    """Ours, and JAX's own by each of its implementations that this device has."""

    def ours(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, x.mask, x.bias, is_causal=cell.causal, key_intervals=x.intervals)

    def peer(implementation: str) -> Attend:
        causal = cell.causal and x.peer_mask is None and cell.Sq > 1
        return lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, bias=x.peer_mask, is_causal=causal, implementation=implementation
        )

    names = ["xla"] + ["cudnn"] * (jax.default_backend() == "gpu" and cell.dtype != "fp32")
    return {bench.OURS: ours, **{f"jax-{name}": peer(name) for name in names}}


def action_of(attend: Attend, x: Inputs, direction: str) -> Callable[[], Any]:
    """What one call of a pass is: it ends when the results are there."""
    if direction == "forward":
        run = jax.jit(attend)
        return lambda: jax.block_until_ready(run(x.q, x.k, x.v))

    @jax.jit
    def step(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return (*pull(dout), out)

    return lambda: jax.block_until_ready(step(x.q, x.k, x.v, x.dout))


def check(cell: bench.Cell, p: bench.Problem, made: Dict[str, Any], direction: str) -> Dict[str, float]:
    """Largest error of out or, of a step, of dq."""
    errors = bench.Errors(cell, p, "forward" if direction == "forward" else "backward")
    first = {name: each if direction == "forward" else each[0] for name, each in made.items()}
    return {name: errors.of(torch.from_dlpack(jax.device_put(each, jax.devices("cpu")[0])).transpose(1, 2))
            for name, each in first.items()}


def run_cell(cell: bench.Cell, options: argparse.Namespace) -> List[Dict[str, Any]]:
    p = bench.make_problem(cell)
    x = inputs_of(p)
    records = []
    for direction in {"both": ("forward", STEP), "forward": ("forward",), "backward": (STEP,)}[options.direction]:
        if direction == STEP and cell.Sq == 1:
            continue
        actions = {name: action_of(attend, x, direction) for name, attend in contenders_of(cell, x).items()}
        record = bench.result_of(cell, p, direction, bench.measure(actions, options.iters))
        if options.check:
            record["error_against_float64"] = check(cell, p, {name: run() for name, run in actions.items()}, direction)
        bench.print_row(record)
        records.append(record)
    return records
