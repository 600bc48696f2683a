"""train_bytes.py: trains a small byte-level language model with dynamic mask attention, beside the same model with SDPA.

    python examples/train_bytes.py                            400 steps, a minute or so on two cores
    python examples/train_bytes.py --steps 1000 --window 32   longer, with a narrower mask
    python examples/train_bytes.py --device cuda              on a GPU, in bfloat16 autocast

The text is the source of Python's own standard library. In each step both models see the same batch, one after the
other, so that a busy machine slows both. They start from the same weights. The one attends densely with PyTorch's
scaled_dot_product_attention; in the other each row keeps the W keys with the largest learned bias, chosen anew in every
step: key intervals, exact, two integers per key. Prints speed and validation loss of both and plots the loss curves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Iterator, Optional, Sequence

import torch
import torch.nn.functional as F
from flash_dmattn import flash_dmattn_func
from flash_dmattn.masks import key_bias, topk_intervals
from torch import Tensor, nn

TRAIN_FILES = """argparse ast bdb calendar cmd codecs configparser contextlib copy csv dataclasses difflib dis doctest enum
    fractions ftplib functools gettext glob gzip heapq imaplib inspect ipaddress locale mailbox optparse pdb pickle
    platform plistlib poplib pprint profile pstats queue random selectors shelve shlex smtplib socket socketserver
    ssl statistics string subprocess tempfile threading timeit tokenize trace traceback types typing unittest/case
    unittest/mock urllib/parse urllib/request uuid warnings weakref webbrowser zipapp""".split()
VALIDATION_FILES = "shutil tarfile textwrap http/client json/decoder logging/handlers".split()


def read_text(names: Sequence[str]) -> Tensor:
    """The bytes of standard library modules, one after the other."""
    folder = Path(os.__file__).parent
    files = [folder / f"{name}.py" for name in names]
    text = b"".join(file.read_bytes() for file in files if file.is_file())
    if not text:
        raise SystemExit(f"train_bytes: {folder} holds no Python source to train on")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


# ---- the model -------------------------------------------------------------------------------------------------------


class DenseAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seqlen, width = x.shape
        q, k, v = self.qkv(x).view(batch, seqlen, 3, self.heads, -1).unbind(2)  # each [B, S, H, D]
        out: Tensor = self.out(self.attend(q, k, v).reshape(batch, seqlen, width))
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class DynamicMaskAttention(DenseAttention):
    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__(width, heads)
        self.window = window
        self.visible_fraction: Tensor | float = 1.0  # of the causal pairs, in the last call
        self.last_bias: Optional[Tensor] = None  # [B, H, S], of the last call

    def add_bias_parameters(self, generator: torch.Generator) -> None:
        """Drawn from a generator of their own, so that all other weights equal the dense model's."""
        width = self.out.in_features
        self.dt_weight = nn.Parameter(torch.randn(self.heads, width, generator=generator) * width**-0.5)
        self.A = nn.Parameter(torch.ones(self.heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dt = F.linear(v.flatten(2), self.dt_weight)  # [B, S, H]
        bias = key_bias(dt, self.A)  # A softplus(dt), [B, H, S], one per key
        start, end = topk_intervals(bias, window_size=self.window)
        self.last_bias = bias.detach()
        with torch.no_grad():
            seqlen = q.shape[1]
            pairs = (end.clamp(max=seqlen) - start).clamp(min=0).sum(-1, dtype=torch.int64)
            self.visible_fraction = pairs.double().mean() / (seqlen * (seqlen + 1) / 2)
        return flash_dmattn_func(q, k, v, attn_bias=bias[:, :, None], is_causal=True, key_intervals=(start, end))


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class ByteModel(nn.Module):
    """Logits [B, S, 256] of the next byte. window None: dense attention."""

    def __init__(self, options: argparse.Namespace, window: Optional[int]) -> None:
        super().__init__()
        torch.manual_seed(options.seed)
        width, heads = options.width, options.heads
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(options.seq, width)
        self.attention: list[DenseAttention] = [
            DenseAttention(width, heads) if window is None else DynamicMaskAttention(width, heads, window)
            for _ in range(options.layers)
        ]
        self.blocks = nn.ModuleList(Block(width, each) for each in self.attention)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
        generator = torch.Generator().manual_seed(options.seed)
        for each in self.attention:
            if isinstance(each, DynamicMaskAttention):
                each.add_bias_parameters(generator)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def loss(self, text: Tensor) -> Tensor:
        """Mean nats per byte of text [B, S + 1]."""
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def visible_fraction(self) -> float:
        fractions = [float(each.visible_fraction) for each in self.attention if isinstance(each, DynamicMaskAttention)]
        return sum(fractions) / len(fractions)


# ---- training --------------------------------------------------------------------------------------------------------


class Run:
    """One model in training, with its clock."""

    def __init__(self, name: str, model: ByteModel, options: argparse.Namespace) -> None:
        self.name, self.model, self.device = name, model.to(options.device), torch.device(options.device)
        self.dtype, steps = getattr(torch, options.dtype), options.steps
        # float16 gradients are scaled, so that small ones do not vanish.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 2e-3, total_steps=max(2, steps + 1))
        self.seconds: list[float] = []
        self.bits: list[float] = []  # per byte, each step

    def loss(self, text: Tensor) -> Tensor:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32):
            return self.model.loss(text)

    def step(self, text: Tensor) -> None:
        began = time.perf_counter()
        loss = self.loss(text)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.append(time.perf_counter() - began)
        self.bits.append(loss.item() / math.log(2))

    @torch.no_grad()
    def validate(self, text: Tensor, options: argparse.Namespace, batches: int = 8) -> float:
        """Bits per byte on windows spread evenly over the text."""
        places = torch.linspace(0, len(text) - options.seq - 1, batches * options.batch).long()
        windows = text[places[:, None] + torch.arange(options.seq + 1)].to(self.device)
        losses = [self.loss(each).item() for each in windows.split(options.batch)]
        return sum(losses) / len(losses) / math.log(2)

    def steps_per_second(self) -> float:
        """Of the median step: the first ones warm up."""
        return 1 / sorted(self.seconds)[len(self.seconds) // 2]


def progress(steps: int) -> Iterator[int]:
    """range(steps) with a bar on a terminal: tqdm's where it is installed, else one line."""
    try:
        from tqdm import tqdm

        yield from tqdm(range(steps), unit="step", disable=not sys.stderr.isatty())
        return
    except ImportError:
        pass
    began = time.monotonic()
    for step in range(steps):
        yield step
        if sys.stderr.isatty():
            done = (step + 1) * 40 // steps
            left = (time.monotonic() - began) / (step + 1) * (steps - step - 1)
            bar = "#" * done + "." * (40 - done)
            print(f"\r{bar} {step + 1}/{steps}, {left:.0f} s left ", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)


def train(options: argparse.Namespace, text: Tensor) -> list[Run]:
    runs = [
        Run("dynamic mask, flash-dmattn", ByteModel(options, options.window), options),
        Run("dense, torch SDPA", ByteModel(options, None), options),
    ]
    generator = torch.Generator().manual_seed(options.seed)
    for step in progress(options.steps):
        places = torch.randint(len(text) - options.seq, (options.batch,), generator=generator)
        batch = text[places[:, None] + torch.arange(options.seq + 1)].to(options.device)
        for run in runs if step % 2 else reversed(runs):  # neither is always the first to touch the batch
            run.step(batch)
    return runs


@torch.no_grad()
def save_bias(run: Run, text: Tensor, options: argparse.Namespace) -> None:
    """The first layer's biases of the first bytes of a text, [1, H, S], for python -m flash_dmattn.masks plot --load."""
    import numpy

    run.loss(text[None, : options.seq + 1].to(run.device))
    first = run.model.attention[0]
    assert isinstance(first, DynamicMaskAttention) and first.last_bias is not None
    numpy.save(options.save_bias, first.last_bias.float().cpu().numpy())


# ---- the report ------------------------------------------------------------------------------------------------------


def plot(runs: list[Run], options: argparse.Namespace) -> bool:
    """Loss curves, averaged over some steps. False when matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    over = max(1, options.steps // 40)
    for run, colour in zip(runs, ("#1f6f8b", "#e08e45")):
        means = torch.tensor(run.bits).unfold(0, over, 1).mean(-1)
        axes.plot(range(over, over + len(means)), means, color=colour, label=run.name)
    axes.set_xlabel(f"step (mean of {over})")
    axes.set_ylabel("training bits per byte")
    axes.set_title(f"{options.layers} layers, width {options.width}, {options.seq} bytes, top {options.window}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(options.plot, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return True


def parse(arguments: Optional[list[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, meaning in (
        ("steps", 400, "training steps of each model"),
        ("seq", 512, "bytes in a sequence"),
        ("window", 64, "keys a row keeps"),
        ("batch", 4, "sequences in a batch"),
        ("layers", 2, "layers"),
        ("width", 128, "width of the model"),
        ("heads", 4, "heads"),
        ("seed", 1, "seed of weights and batches"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} ({default})")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (cpu)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="autocast dtype of both models; default float32 on the CPU, bfloat16 on CUDA devices",
    )
    parser.add_argument("--plot", default="train_bytes.png", help="where the loss curves go (train_bytes.png)")
    parser.add_argument("--save-bias", metavar="FILE.npy", help="write the biases that the first layer learned")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(arguments)
    for name in ("steps", "seq", "window", "batch", "layers", "width", "heads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if options.width % options.heads:
        parser.error(f"--width is {options.width}; it must be a multiple of --heads {options.heads}")
    if options.device.partition(":")[0] not in ("cpu", "cuda"):
        parser.error(f"--device is {options.device}; it must be cpu, cuda or cuda:INDEX")
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device is {options.device}, but PyTorch sees no CUDA device")
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    return options


def main(arguments: Optional[list[str]] = None) -> int:
    options = parse(arguments)
    train_text, validation_text = read_text(TRAIN_FILES), read_text(VALIDATION_FILES)
    if min(len(train_text), len(validation_text)) <= options.seq + 1:
        raise SystemExit(f"train_bytes: --seq is {options.seq}; the texts have only {len(validation_text)} bytes")
    runs = train(options, train_text)
    plotted = plot(runs, options)
    if options.save_bias:
        save_bias(runs[0], validation_text, options)
    results = [
        {
            "name": run.name,
            "steps_per_second": round(run.steps_per_second(), 3),
            "validation_bits_per_byte": round(run.validate(validation_text, options), 4),
            "training_bits_per_byte": [round(bits, 6) for bits in run.bits],
        }
        for run in runs
    ]
    fraction = runs[0].model.visible_fraction()
    if options.json:
        print(json.dumps({"options": vars(options), "visible_fraction": round(fraction, 5), "runs": results}))
        return 0
    for result in results:
        print(
            f"{result['name']:<28}{result['steps_per_second']:7.2f} steps/s"
            f"{result['validation_bits_per_byte']:8.3f} bits per byte in validation"
        )
    print(f"the dynamic mask shows {fraction:.1%} of the causal pairs")
    print(f"loss curves: {options.plot}" if plotted else "no plot: matplotlib is not installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
