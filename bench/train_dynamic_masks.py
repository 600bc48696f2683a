#!/usr/bin/env python3
"""train_dynamic_masks.py: trains the language model of examples/train_bytes.py on real text in four ways, step by step beside
each other: with key intervals, with the same choice in FlexAttention's block masks, with the same choice as a dense mask
(as flash-dmattn 1.2 has it), and densely without a choice (PyTorch's SDPA).

    python bench/train_dynamic_masks.py --device cuda --out DIR              S 8192 and 32768, W = S / 16
    python bench/train_dynamic_masks.py --seq 256 --steps 30 --out DIR       on a CPU: that it runs, no more

All start from the same weights and see the same batches. Writes DIR/train_dynamic_masks.json and .png, and prints a table:
tokens a second of the median step, the most device memory that a step took, bits per byte in training (the last tenth of the
steps) and in validation. A way that does not fit in memory, or does not run on the device, is named so.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch
import torch.nn.functional as F
from flash_dmattn import masks
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
    "flash-dmattn, key intervals": train_bytes.DynamicMaskAttention,
    "FlexAttention, block mask of the same choice": FlexAttention,
    "dense mask of the same choice, as in 1.2": DenseMaskAttention,
    "no choice, torch SDPA": None,
}


def model_of(way: Optional[type], options: argparse.Namespace) -> train_bytes.ByteModel:
    model = train_bytes.ByteModel(options, None if way is None else options.window)
    for block in model.blocks if way is not None else ():
        block.attention.__class__ = way
    return model


# ---- training --------------------------------------------------------------------------------------------------------


class Way:
    """One way in training; `failed` says why it ended."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.failed, self.peak_bytes = name, None, 0
        self.run: Optional[train_bytes.Run] = train_bytes.Run(name, model_of(WAYS[name], options), options)
        self.seconds, self.bits = self.run.seconds, self.run.bits
        self.validation: Optional[float] = None

    def call(self, what: Callable[[train_bytes.Run], Any]) -> Any:
        """what(run); the way ends where memory is short, or PyTorch has no such pass (FlexAttention's backward on the CPU)."""
        if self.run is None:
            return None
        on_cuda = self.run.device.type == "cuda"
        try:
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
            result = what(self.run)
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated() if on_cuda else 0)
            return result
        except torch.OutOfMemoryError:
            self.failed, self.run = "does not fit in memory", None
        except NotImplementedError as error:
            self.failed, self.run = str(error).partition(".")[0], None
        gc.collect()
        torch.cuda.empty_cache()
        return None

    def report(self, options: argparse.Namespace) -> Dict[str, Any]:
        done = {"name": self.name, "failed": self.failed, "seconds": self.seconds, "training_bits_per_byte": self.bits}
        if self.failed is None:
            median = sorted(self.seconds)[len(self.seconds) // 2]
            last = self.bits[-max(1, len(self.bits) // 10) :]
            done |= {
                "tokens_per_second": options.batch * options.seq / median,
                "peak_bytes": self.peak_bytes or None,
                "training_bits_at_the_end": sum(last) / len(last),
                "validation_bits_per_byte": self.validation,
            }
        return done


def train(options: argparse.Namespace, text: Tensor, validation: Tensor) -> Dict[str, Any]:
    ways = [Way(name, options) for name in options.ways]
    generator = torch.Generator().manual_seed(options.seed)
    for step in train_bytes.progress(options.steps):
        places = torch.randint(len(text) - options.seq, (options.batch,), generator=generator)
        batch = text[places[:, None] + torch.arange(options.seq + 1)].to(options.device)
        for way in ways if step % 2 else reversed(ways):  # none is always the first to touch the batch
            way.call(lambda run: run.step(batch))
    for way in ways:
        way.validation = way.call(lambda run: run.validate(validation, options, batches=4))
    return {"seq": options.seq, "window": options.window, "steps": options.steps, "ways": [w.report(options) for w in ways]}


# ---- the report ------------------------------------------------------------------------------------------------------


def print_table(result: Dict[str, Any]) -> None:
    print(f"\nS {result['seq']}, W {result['window']}, {result['steps']} steps\n")
    print("| way | tokens/s | memory | training, bits a byte | validation |\n|---|---|---|---|---|")
    for way in result["ways"]:
        if way["failed"]:
            print(f"| {way['name']} | {way['failed']} | | | |")
            continue
        memory = f"{way['peak_bytes'] / 2**30:.1f} GiB" if way["peak_bytes"] else "not measured"
        print(
            f"| {way['name']} | {way['tokens_per_second']:,.0f} | {memory} | {way['training_bits_at_the_end']:.3f} | "
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

    results = report["results"]
    figure, panels = pyplot.subplots(1, len(results), figsize=(6 * len(results), 4), squeeze=False)
    for axes, result in zip(panels[0], results):
        over = max(1, result["steps"] // 20)
        for way, colour in zip(result["ways"], ("#1f6f8b", "#e08e45", "#8b3a62", "#777777")):
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
    for n, seq in enumerate(options.seq):
        if min(len(text), len(validation)) <= seq + 1:
            raise SystemExit(f"train_dynamic_masks: --seq is {seq}; the texts have only {len(validation)} bytes")
        steps = options.steps[min(n, len(options.steps) - 1)]
        one = argparse.Namespace(**{**vars(options), "seq": seq, "steps": steps, "window": options.window or max(1, seq // 16)})
        report["results"].append(train(one, text, validation))
        print_table(report["results"][-1])
        (options.out / "train_dynamic_masks.json").write_text(json.dumps(report, indent=1) + "\n")
        gc.collect()
    if not plot(report, options.out / "train_dynamic_masks.png"):
        print("no plot: matplotlib is not installed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
