"""python -m flash_dmattn.masks plot: a picture of a top-W mask: who sees which key, and how long keys live."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Optional, Sequence

import numpy

from .masks import intervals_to_mask, topk_intervals

KINDS = ("random", "relu", "rising", "falling")


def biases(kind: str, keys: int, seed: int) -> Any:
    """float32 [keys]."""
    values = numpy.random.default_rng(seed).standard_normal(keys)
    trend = numpy.linspace(0, 3, keys)
    chosen = {"random": values, "relu": values.clip(0), "rising": values + trend, "falling": values - trend}[kind]
    return chosen.astype(numpy.float32)


def loaded(path: str) -> Any:
    """float32 [keys] of a .npy file; of more axes the first head."""
    values = numpy.load(path)
    if values.ndim < 1 or values.shape[-1] == 0:
        raise SystemExit(f"masks plot: {path} has shape {list(values.shape)}; it must end with the keys")
    return values.reshape(-1, values.shape[-1])[0].astype(numpy.float32)


def draw(bias: Any, window: int, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    keys = len(bias)
    start, end = topk_intervals(bias[None, None], window)
    visible = intervals_to_mask(start, end, keys)[0, 0]
    lives = numpy.minimum(end[0, 0], keys) - start[0, 0]
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(6.5, 8.5), sharex=True, gridspec_kw={"height_ratios": (4, 1)}, layout="constrained"
    )
    upper.imshow(visible, cmap="Blues", aspect="auto", interpolation="nearest", vmin=0, vmax=1.4)
    upper.set_ylabel("query row")
    upper.set_title(f"{title}: {visible.sum() / (keys * (keys + 1) / 2):.1%} of the causal pairs, W = {window}")
    colours = numpy.where(end[0, 0] == 2**31 - 1, "#e08e45", "#1f6f8b")
    lower.bar(numpy.arange(keys), lives, width=1.0, color=colours)
    lower.set_ylabel("rows that see it")
    lower.set_xlabel("key (orange: never dropped)")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m flash_dmattn.masks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plot = commands.add_parser("plot", help="a picture of a top-W mask of one head")
    plot.add_argument("--window", type=int, default=32, help="W (32)")
    plot.add_argument("--keys", type=int, default=256, help="keys and query rows (256)")
    plot.add_argument("--bias", choices=KINDS, default="random", help="made-up biases")
    plot.add_argument("--load", metavar="FILE", help="a .npy file of biases [.., keys] instead; the first head of them")
    plot.add_argument("--seed", type=int, default=0)
    plot.add_argument("--out", type=Path, default=Path("mask.png"))
    options = parser.parse_args(arguments)
    if options.window < 1 or options.keys < 1:
        parser.error("--window and --keys must be at least 1")
    bias = loaded(options.load) if options.load else biases(options.bias, options.keys, options.seed)
    draw(bias, options.window, Path(options.load).name if options.load else f"{options.bias} biases", options.out)
    print(f"written: {options.out}")
