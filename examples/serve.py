"""serve.py: an inference engine in one file: requests come and go, share one step, and keep their keys in pages.

    python examples/serve.py                       24 requests through a small model with random weights, on the CPU
    python examples/serve.py --page 1 --budget 16  pages of one key, prompts cut into chunks of few tokens

A step takes every running request at once: one row of each that generates, and a chunk of the prompts that are new
(continuous batching, chunked prefill). One call a layer appends the step's keys to their pages, turns them and the
queries by rotary embeddings, and attends. A prompt that begins as another one did takes over its full pages. When pages
run out, the youngest request gives back its own and starts again later. Each request's tokens are then compared with
those that the same model gives it alone, without a cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from flash_dmattn import flash_dmattn_func, flash_dmattn_with_kvcache_func
from torch import Tensor

# ---- the model -------------------------------------------------------------------------------------------------------


class Model:
    """A decoder with grouped heads, rotary embeddings and a gated feed-forward; weights from a seed."""

    def __init__(self, layers: int, heads: int, heads_kv: int, dim: int, vocabulary: int, seed: int) -> None:
        generator, width = torch.Generator().manual_seed(seed), heads * dim
        self.heads, self.heads_kv, self.dim, self.layers = heads, heads_kv, dim, layers

        def weights(*shape: int) -> Tensor:
            drawn: Tensor = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5
            return drawn

        self.embedding = weights(vocabulary, width) * width**0.5
        self.qkv = [weights((heads + 2 * heads_kv) * dim, width) for _ in range(layers)]
        self.out = [weights(width, width) for _ in range(layers)]
        self.up, self.down = ([weights(*pair) for _ in range(layers)] for pair in ((8 * dim, width), (width, 4 * dim)))
        angles = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        self.rotary = angles.cos(), angles.sin()

    def split(self, layer: int, x: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
        """q, k and v of rows [T, width]: [T, heads, dim]."""
        rows: Tensor = F.linear(F.rms_norm(x, x.shape[-1:]), self.qkv[layer]).view(len(x), -1, self.dim)
        q, k, v = rows.split((self.heads, self.heads_kv, self.heads_kv), 1)
        return q, k, v

    def finish(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        x = x + F.linear(attended.flatten(1), self.out[layer])
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:]), self.up[layer]).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down[layer])

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, x.shape[-1:]), self.embedding)

    def turn(self, x: Tensor) -> Tensor:
        """Rotary embeddings of [T, heads, dim] from position 0 on."""
        cos, sin = (table[: len(x), None] for table in self.rotary)
        one, other = x.chunk(2, -1)
        return torch.cat((one * cos - other * sin, one * sin + other * cos), -1)

    def alone(self, prompt: Sequence[int], count: int) -> Tuple[List[int], List[float]]:
        """Greedy tokens without a cache, and by how much each was the best."""
        tokens, margins = list(prompt), []
        for _ in range(count):
            x = self.embedding[tokens]
            for layer in range(self.layers):
                q, k, v = self.split(layer, x)
                attended = flash_dmattn_func(self.turn(q)[None], self.turn(k)[None], v[None], is_causal=True)
                x = self.finish(layer, x, attended[0])
            best = self.logits(x[-1:])[0].topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
        return tokens[len(prompt) :], margins


# ---- pages -----------------------------------------------------------------------------------------------------------


class Pages:
    """Who holds a page, and which full pages of prompts there are."""

    def __init__(self, count: int, size: int) -> None:
        self.size, self.free = size, list(range(count))
        self.holders = [0] * count
        self.known: Dict[Tuple[int, ...], int] = {}  # the tokens up to a full page's end -> the page

    def take(self) -> Optional[int]:
        if not self.free:
            return None
        page = self.free.pop()
        self.holders[page] = 1
        return page

    def give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.free.append(page)
                self.known = {tokens: each for tokens, each in self.known.items() if each != page}

    def share(self, prompt: Sequence[int]) -> List[int]:
        """Full pages of the prompt's beginning that are there already; its last token is always computed."""
        pages: List[int] = []
        for end in range(self.size, len(prompt), self.size):
            page = self.known.get(tuple(prompt[:end]))
            if page is None:
                break
            self.holders[page] += 1
            pages.append(page)
        return pages


# ---- the engine ------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    prompt: List[int]
    count: int
    tokens: List[int] = field(default_factory=list)  # generated
    pages: List[int] = field(default_factory=list)
    length: int = 0  # keys in pages

    def pending(self) -> List[int]:
        """Tokens whose keys are not in pages yet."""
        return (self.prompt + self.tokens)[self.length :]


class Engine:
    def __init__(self, model: Model, pages: int, page: int, budget: int) -> None:
        self.model, self.pages, self.budget = model, Pages(pages, page), budget
        shape = (pages, page, model.heads_kv, 2 * model.dim)
        # K and V of a layer in one tensor. What it holds before it is written never reaches a result.
        self.caches = [torch.full(shape, float("nan")) for _ in range(model.layers)]
        self.waiting: List[Request] = []
        self.running: List[Request] = []
        self.steps = self.preempted = self.shared = 0

    def reserve(self, request: Request, length: int) -> bool:
        """Pages for so many keys. Where there is none left, the youngest other request gives back its own."""
        while len(request.pages) * self.pages.size < length:
            page = self.pages.take()
            if page is not None:
                request.pages.append(page)
                continue
            victim = self.running[-1]
            if victim is request:
                return False
            self.preempt(victim)
        return True

    def preempt(self, request: Request) -> None:
        self.pages.give_back(request.pages)
        request.pages, request.length = [], 0
        self.running.remove(request)
        self.waiting.insert(0, request)
        self.preempted += 1

    def schedule(self) -> List[Tuple[Request, List[int]]]:
        """The tokens of this step: requests that generate first, then prompts, as far as the budget goes."""
        batch: List[Tuple[Request, List[int]]] = []
        left = self.budget
        for request in list(self.running):
            if request not in self.running or left == 0:
                continue
            chunk = request.pending()[:left]
            if self.reserve(request, request.length + len(chunk)):
                batch.append((request, chunk))
                left -= len(chunk)
        batch = [(request, chunk) for request, chunk in batch if request in self.running]
        while self.waiting and left > 0:
            request = self.waiting[0]
            if not request.pages:
                request.pages = self.pages.share(request.prompt)
                request.length = len(request.pages) * self.pages.size
                self.shared += len(request.pages)
            chunk = request.pending()[:left]
            if len(self.pages.free) * self.pages.size < len(chunk):
                break
            self.running.append(self.waiting.pop(0))
            self.reserve(request, request.length + len(chunk))
            batch.append((request, chunk))
            left -= len(chunk)
        return batch

    def forward(self, batch: Sequence[Tuple[Request, List[int]]]) -> Tensor:
        """One call a layer for all of them; logits of each request's last row."""
        model, counts = self.model, [len(chunk) for _, chunk in batch]
        offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        table = torch.full((len(batch), max(len(request.pages) for request, _ in batch)), -1, dtype=torch.int32)
        for row, (request, _) in zip(table, batch):
            row[: len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
        lengths = torch.tensor([request.length for request, _ in batch], dtype=torch.int32)
        x = model.embedding[[token for _, chunk in batch for token in chunk]]
        for layer, cache in enumerate(self.caches):
            q, k, v = model.split(layer, x)
            attended = flash_dmattn_with_kvcache_func(
                *(q, cache[..., : model.dim], cache[..., model.dim :], k, v),
                cache_seqlens=lengths,
                block_table=table,
                cu_seqlens_q=offsets,
                cu_seqlens_new=offsets,
                rotary=model.rotary,
            )
            x = model.finish(layer, x, attended)
        return model.logits(x[offsets[1:].long() - 1])

    def step(self) -> List[Request]:
        """Runs a step; the requests that it ends."""
        batch, done = self.schedule(), []
        if not batch:
            raise SystemExit("serve: the pages do not hold one request")
        logits = self.forward(batch)
        for (request, chunk), row in zip(batch, logits):
            request.length += len(chunk)
            for number, page in enumerate(request.pages):
                end = (number + 1) * self.pages.size
                if end <= min(request.length, len(request.prompt)):
                    self.pages.known.setdefault(tuple(request.prompt[:end]), page)
            if request.length < len(request.prompt) + len(request.tokens):
                continue  # the rest of its prompt comes in a later step
            request.tokens.append(int(row.argmax()))
            if len(request.tokens) == request.count:
                self.running.remove(request)
                self.pages.give_back(request.pages)
                done.append(request)
        self.steps += 1
        return done


def requests_of(count: int, vocabulary: int, seed: int) -> List[Request]:
    """Prompts of 3 to 60 tokens, half of which begin alike, that want 1 to 30 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, size: int) -> List[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    start = numbers(0, vocabulary, 40)
    return [
        Request((start if numbers(0, 2, 1)[0] else []) + numbers(0, vocabulary, numbers(3, 61, 1)[0]), numbers(1, 31, 1)[0])
        for _ in range(count)
    ]


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description="Serves random requests from pages, and checks each against a call alone.")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--page", type=int, default=16, help="keys of a page")
    parser.add_argument("--keys", type=int, default=768, help="keys that all pages hold together")
    parser.add_argument("--budget", type=int, default=64, help="tokens of a step")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    model = Model(layers=2, heads=4, heads_kv=2, dim=16, vocabulary=97, seed=options.seed)
    engine = Engine(model, options.keys // options.page, options.page, options.budget)
    everyone = requests_of(options.requests, 97, options.seed + 1)
    arriving, begin, generated, ended = list(everyone), time.perf_counter(), 0, 0
    with torch.no_grad():
        while ended < len(everyone):
            engine.waiting += [arriving.pop(0) for _ in range(min(2, len(arriving)))]  # two arrive in each step
            ended += len(engine.step())
        seconds = time.perf_counter() - begin
        wrong = 0
        for request in everyone:
            expected, margins = model.alone(request.prompt, request.count)
            generated += len(request.tokens)
            # Where two tokens are as good up to rounding, either is right, and what follows is another text.
            same = next((i for i, pair in enumerate(zip(expected, request.tokens)) if pair[0] != pair[1]), None)
            wrong += same is not None and margins[same] > 1e-4
    counts = {"requests": len(everyone), "tokens": generated, "steps": engine.steps, "shared_pages": engine.shared}
    print(json.dumps({**counts, "preempted": engine.preempted, "wrong": wrong, "seconds": round(seconds, 3)}))
    return 1 if wrong or len(engine.pages.free) != options.keys // options.page else 0


if __name__ == "__main__":
    sys.exit(main())
