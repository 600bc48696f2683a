#!/usr/bin/env python3
"""train_dynamic_masks.py: trains the language model of examples/train_bytes.py on real text in four ways: with key
intervals, densely without a choice (PyTorch's SDPA), with the same choice in FlexAttention's block masks, and with the same
choice as a dense mask (as flash-dmattn 1.2 has it).

    python bench/train_dynamic_masks.py --device cuda --out DIR              S 8192 and 32768, W = S / 16
    python bench/train_dynamic_masks.py --seq 256 --steps 30 --out DIR       on a CPU: that it runs, no more

The text is the source of Python's own standard library, so nothing is fetched. All ways start from the same weights and see
the same batches, one way after the other. Writes DIR/train_dynamic_masks.json and .png, after each way anew, and prints a
table: tokens a second of the median step, the most device memory that a step took, bits per byte in training (the last tenth of
the steps) and in validation (the masked ways all by key intervals: it is the same function). A way that does not fit in memory,
or fails otherwise, is named so, and the others go on. With --seconds no way trains longer than its share of what is left; its
first step, which compiles, is not cut short.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
import torch.nn.functional as F
from flash_dmattn import flash_dmattn_func, masks
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import train_bytes  # noqa: E402  (an example: no part of the package)

# ---- the ways --------------------------------------------------------------------------------------------------------


class Bias:
    """What the masked ways share: the bias of train_bytes.DynamicMaskAttention, [B, H, S], one number a key."""

    dt_weight: Tensor
    A: Tensor
    window: int

    def bias_of(self, v: Tensor) -> Tensor:
        return masks.key_bias(F.linear(v.flatten(2), self.dt_weight), self.A)


def flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """FlexAttention with the block mask of intervals, which is made in every step; q, k, v [B, H, S, D]."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (start[b, h, j] <= i) & (i < end[b, h, j])

    def with_bias(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + bias[b, h, j]

    batch, heads, seqlen, _ = q.shape
    block_mask = create_block_mask(visible, batch, heads, seqlen, seqlen, q.device)
    return flex_attention(q, k, v, score_mod=with_bias, block_mask=block_mask)


_compiled: Dict[Any, Callable[..., Tensor]] = {}


class IntervalAttention(train_bytes.DynamicMaskAttention, Bias):
    """What a model would do, without the example's count of visible pairs."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.bias_of(v)
        pair = masks.topk_intervals(bias, self.window)
        return flash_dmattn_func(q, k, v, attn_bias=bias, is_causal=True, key_intervals=pair)


class FlexAttention(train_bytes.DynamicMaskAttention, Bias):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.bias_of(v)
        pair = masks.topk_intervals(bias, self.window)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if q.is_cuda and q.shape not in _compiled:
            _compiled[q.shape] = torch.compile(flex, dynamic=False)
        call = _compiled[q.shape] if q.is_cuda else flex
        return call(q, k, v, bias, *pair).transpose(1, 2)


class DenseMaskAttention(train_bytes.DynamicMaskAttention, Bias):
    """The choice by torch.topk on a bias [B, H, S, S], the mask by scatter, attention with bias and mask as one tensor."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seqlen, bias = q.shape[1], self.bias_of(v)[:, :, None]
        lowest = torch.finfo(bias.dtype).min
        causal = torch.ones(seqlen, seqlen, dtype=torch.bool, device=q.device).tril()
        with torch.no_grad():
            seen = torch.where(causal, bias, lowest)
            values, indices = torch.topk(seen, min(self.window, seqlen), dim=-1, sorted=False)
            mask = torch.zeros_like(seen, dtype=torch.bool).scatter_(-1, indices, values != lowest)
            del seen, values, indices
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        score = bias.to(q.dtype).masked_fill(~mask, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=score).transpose(1, 2)


WAYS: Dict[str, Optional[type]] = {
    "flash-dmattn, key intervals": IntervalAttention,
    "no choice, torch SDPA": None,
    "FlexAttention, block mask of the same choice": FlexAttention,
    "dense mask of the same choice, as in 1.2": DenseMaskAttention,
}


def model_of(way: Optional[type], options: argparse.Namespace) -> train_bytes.ByteModel:
    model = train_bytes.ByteModel(options, None if way is None else options.window)
    for block in model.blocks if way is not None else ():
        block.attention.__class__ = way
    return model


# ---- training --------------------------------------------------------------------------------------------------------


def batches(options: argparse.Namespace, text: Tensor) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        places = torch.randint(len(text) - options.seq, (options.batch,), generator=generator)
        yield text[places[:, None] + torch.arange(options.seq + 1)].to(options.device)


def train(run: train_bytes.Run, options: argparse.Namespace, text: Tensor, seconds: float) -> None:
    """All steps, or those that begin within `seconds` of the end of the first one."""
    source, began = batches(options, text), None
    for _ in range(options.steps):
        if began is not None and time.monotonic() - began > seconds:
            return
        run.step(next(source))
        began = time.monotonic() if began is None else began


def validate(run: train_bytes.Run, options: argparse.Namespace, text: Tensor) -> float:
    for block in run.model.blocks:
        if isinstance(block.attention, train_bytes.DynamicMaskAttention):
            block.attention.__class__ = IntervalAttention
    return run.validate(text, options, batches=4)


def one_way(name: str, options: argparse.Namespace, text: Tensor, validation: Tensor, seconds: float) -> Dict[str, Any]:
    """Trains and validates; an exception becomes the result's `failed`."""
    done: Dict[str, Any] = {"name": name, "failed": None, "seconds": [], "training_bits_per_byte": []}
    on_cuda = options.device != "cpu"
    try:
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        run = train_bytes.Run(name, model_of(WAYS[name], options), options)
        done |= {"seconds": run.seconds, "training_bits_per_byte": run.bits}
        train(run, options, text, seconds)
        last, median = run.bits[-max(1, len(run.bits) // 10) :], sorted(run.seconds)[len(run.seconds) // 2]
        done |= {
            "tokens_per_second": options.batch * options.seq / median,
            "peak_bytes": torch.cuda.max_memory_allocated() if on_cuda else None,
            "training_bits_at_the_end": sum(last) / len(last),
            "validation_bits_per_byte": validate(run, options, validation),
        }
    except torch.OutOfMemoryError:
        done["failed"] = "does not fit in memory"
    except Exception as error:  # whatever it is, the other ways are worth their time
        done["failed"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].partition('. ')[0][:160]}"
    return done


def clear() -> None:
    """What a way leaves behind: its frames are gone."""
    _compiled.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- the report ------------------------------------------------------------------------------------------------------


def print_table(result: Dict[str, Any]) -> None:
    print(f"\nS {result['seq']}, W {result['window']}, {result['steps']} steps\n")
    print("| way | steps | tokens/s | memory | training, bits a byte | validation |\n|---|---|---|---|---|---|")
    for way in result["ways"]:
        if way["failed"]:
            print(f"| {way['name']} | {way['failed']} | | | | |")
            continue
        memory = f"{way['peak_bytes'] / 2**30:.1f} GiB" if way["peak_bytes"] else "not measured"
        print(
            f"| {way['name']} | {len(way['seconds'])} | {way['tokens_per_second']:,.0f} | {memory} | {way['training_bits_at_the_end']:.3f} | "
            f"{way['validation_bits_per_byte']:.3f} |"
        )


def plot(report: Dict[str, Any], path: Path) -> bool:
    """Loss against seconds of training, a panel a length. False when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter

    results = [each for each in report["results"] if each["ways"]]
    figure, panels = pyplot.subplots(1, len(results), figsize=(6 * len(results), 4), squeeze=False)
    for axes, result in zip(panels[0], results):
        over = max(1, result["steps"] // 20)
        for way, colour in zip(result["ways"], ("#1f6f8b", "#777777", "#e08e45", "#8b3a62")):
            if len(way["training_bits_per_byte"]) <= over:
                continue
            means = torch.tensor(way["training_bits_per_byte"]).unfold(0, over, 1).mean(-1)
            # The first step compiles: each counts as the median one does.
            median = sorted(way["seconds"])[len(way["seconds"]) // 2]
            axes.plot([median * (n + over) for n in range(len(means))], means, color=colour, label=way["name"])
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("seconds of training (median step times steps)")
        axes.set_ylabel(f"training bits per byte (mean of {over})")
        axes.set_title(f"S {result['seq']}, W {result['window']}: {report['device']}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
    return True


def device_name(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a CPU")


def parse(arguments: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, nargs="+", default=[8192, 32768], help="bytes in a sequence (8192 32768)")
    parser.add_argument("--window", type=int, default=0, help="keys a row keeps (S / 16)")
    parser.add_argument("--steps", type=int, nargs="+", default=[200, 40], help="of each length (200 40)")
    for name, default in (("batch", 1), ("layers", 4), ("width", 512), ("heads", 8), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (cpu)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="float32 on the CPU, bfloat16 on CUDA devices")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of the whole command, about (no limit)")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY", help="by name (all)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(arguments)
    if min(*options.seq, *options.steps, options.batch, options.layers, options.width, options.heads) < 1:
        parser.error("every number must be at least 1, --window 0 is S / 16")
    if options.width % options.heads:
        parser.error(f"--width is {options.width}; it must be a multiple of --heads {options.heads}")
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device is {options.device}, but PyTorch sees no CUDA device")
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    return options


def commit() -> str:
    found = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "unknown"


def main(arguments: Optional[List[str]] = None) -> int:
    options = parse(arguments)
    text, validation = (train_bytes.read_text(names) for names in (train_bytes.TRAIN_FILES, train_bytes.VALIDATION_FILES))
    report = {
        "command": " ".join(sys.argv), "commit": commit(), "device": device_name(options.device), "dtype": options.dtype,
        "torch": torch.__version__, "model": {n: getattr(options, n) for n in ("batch", "layers", "width", "heads", "seed")},
        "results": [],
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    began, left = time.monotonic(), len(options.seq) * len(options.ways)
    for n, seq in enumerate(options.seq):
        if min(len(text), len(validation)) <= seq + 1:
            raise SystemExit(f"train_dynamic_masks: --seq is {seq}; the texts have only {len(validation)} bytes")
        steps = options.steps[min(n, len(options.steps) - 1)]
        one = argparse.Namespace(**{**vars(options), "seq": seq, "steps": steps, "window": options.window or max(1, seq // 16)})
        result: Dict[str, Any] = {"seq": seq, "window": one.window, "steps": steps, "ways": []}
        report["results"].append(result)
        for name in options.ways:
            share = (options.seconds - (time.monotonic() - began)) / left
            result["ways"].append(one_way(name, one, text, validation, share))
            left -= 1
            clear()
            (options.out / "train_dynamic_masks.json").write_text(json.dumps(report, indent=1) + "\n")
            plotted = plot(report, options.out / "train_dynamic_masks.png")
        print_table(result)
        sys.stdout.flush()
    if not plotted:
        print("no plot: matplotlib is not installed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
