"""Trains a small language model on bytes whose one long sequence lies on several ranks.

    torchrun --nproc-per-node 2 examples/train_context_parallel.py --seq 131072      # two GPUs, NCCL
    torchrun --nproc-per-node 2 examples/train_context_parallel.py --seq 512         # two CPU processes, gloo

With --fsdp parameters are cut over the ranks too.

Each rank holds its rows of every tensor. Attention alone looks across ranks. Labels are shifted before rows are dealt
out, rotary angles come from global positions, the loss is divided by the tokens of all ranks, and gradients of parameters
are summed over them. The losses are those of one rank.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, List, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from flash_dmattn.context_parallel import ContextParallel, Layout
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


def rotary(x: Tensor, positions: Tensor) -> Tensor:
    """x [B, rows, heads, D], turned by the angles of its rows' global positions."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = (positions[:, None] * rates)[None, :, None]
    first, second = x[..., :half], x[..., half:]
    sine, cosine = angles.sin(), angles.cos()
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, heads_kv: int) -> None:
        super().__init__()
        self.heads, self.heads_kv, self.head_dim = heads, heads_kv, width // heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, (heads + 2 * heads_kv) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, cp: ContextParallel, positions: Tensor) -> Tensor:
        batch, rows, width = x.shape
        sizes = [self.heads, self.heads_kv, self.heads_kv]
        q, k, v = self.qkv(self.norms[0](x)).view(batch, rows, -1, self.head_dim).split(sizes, 2)
        q, k = rotary(q, positions), rotary(k, positions)
        attended = cp.flash_dmattn_func(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(batch, rows, width))
        result: Tensor = x + self.mlp(self.norms[1](x))
        return result


class Model(nn.Module):
    def __init__(self, options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, options.width)
        layers = [Layer(options.width, options.heads, options.heads_kv) for _ in range(options.layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, 256, bias=False)

    def forward(self, tokens: Tensor, cp: ContextParallel, positions: Tensor, recompute: bool) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, cp, positions, use_reentrant=False) if recompute else layer(x, cp, positions)
        logits: Tensor = self.head(self.norm(x))
        return logits


def batch_of(text: Tensor, seq: int, step: int, layout: Layout, rank: int) -> Tuple[Tensor, Tensor]:
    """The rank's tokens and labels [1, rows]."""
    first = step * seq % max(1, len(text) - seq - 1)
    tokens, labels = text[first : first + seq], text[first + 1 : first + seq + 1]  # shifted before they are dealt out
    return layout.shard(tokens[None], 1, rank), layout.shard(labels[None], 1, rank)


def train(options: Any, device: torch.device) -> List[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = Layout.zigzag(options.seq, ranks, options.block)
    cp = ContextParallel(layout, timeout=options.timeout)
    positions = cp.positions(device)
    raw = torch.frombuffer(bytearray(Path(options.text).read_bytes()), dtype=torch.uint8).long()
    text = raw.repeat(-(-(options.seq + 2) // len(raw))).to(device)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Model(options).to(device, dtype)
    if options.fsdp:
        fully_shard(model, mesh=init_device_mesh(device.type, (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    losses = []
    for step in range(options.steps):
        tokens, labels = batch_of(text, options.seq, step, layout, rank)
        logits = model(tokens, cp, positions, options.recompute)
        total = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        loss = total / options.seq  # the tokens of all ranks
        optimizer.zero_grad()
        if options.fsdp:
            (loss * ranks).backward()  # it takes the mean of gradients
        else:
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        whole = loss.detach()
        dist.all_reduce(whole)
        losses.append(float(whole))
        if rank == 0 and not options.json:
            print(f"step {step}: {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("seq", 4096), ("layers", 4), ("width", 256), ("heads", 4), ("heads-kv", 2), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--block", type=int, default=256, help="rows of the sequence that stay together")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--timeout", type=float, default=120, help="seconds to wait for a rank that is late")
    parser.add_argument("--text", default=__file__)
    parser.add_argument("--recompute", action="store_true", help="checkpoint every layer")
    parser.add_argument("--fsdp", action="store_true", help="parameters are cut over ranks")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    losses = train(options, device)
    if dist.get_rank() == 0 and options.json:
        print(json.dumps({"losses": losses}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
