#!/usr/bin/env python3
"""bench_serving.py: how fast attention on a KV cache is: pages beside a contiguous cache, uneven lengths, windows,
sinks, prompts, mixed batches, appending, and what a call costs the host.

Keys and values of all cases are views of one pool. Pages are scattered over it, and successive calls read successive
parts of it, so that no call finds its keys in the second-level cache. A CUDA graph holds several calls. The ways of a
case are timed round after round, by events. A time is the median of a call, in microseconds. Bandwidth counts the
bytes of K and V that rows see; the copy of the same run counts bytes read and written. Before it is timed, one row of
two sequences is compared with float32 arithmetic.

Usage: bench_serving.py [--json FILE] [--only CASE ...] [--rounds N] [--device cuda|cpu] [--commit HASH]
With --device cpu small shapes run, which proves the program and tells nothing of speed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from flash_dmattn import append_kv_cache, flash_dmattn_func, flash_dmattn_with_kvcache_func

from bench_peers import PEERS, Problem
from masks_cuda import commit
from python_overhead import microseconds

Call = Callable[[], Any]
CONTIGUOUS = "contiguous"
POOL = 32 * 32768 * 8 * 128  # elements of K, and of V: a contiguous cache of D6
ROTATIONS, MOST_CALLS = 4, 64
UNEVEN = [round(1024 * 32 ** (n / 31)) for n in range(32)]  # 1k to 32k: 301135 keys
WRONG = 0.05  # of the largest value of a row


class Bench:
    """The device, the pool, and how much smaller shapes are than those of a device."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds, self.on_cuda = device, rounds, device != "cpu"
        self.part = 1 if self.on_cuda else 64
        torch.manual_seed(0)
        self.k, self.v = (torch.empty(POOL // self.part, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))

    def keys(self, lengths: Sequence[int]) -> List[int]:
        return [max(length // self.part, 2) for length in lengths]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).bfloat16()

    def wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()


class Sequences:
    """The sequences of a case, their query, and their keys in pages or one behind the other."""

    def __init__(self, bench: Bench, heads: int, heads_kv: int, dim: int, lengths: Sequence[int],
                 rows: Optional[Sequence[int]] = None, window: int = -1, sink: bool = False) -> None:
        self.bench, self.heads, self.heads_kv, self.dim, self.window = bench, heads, heads_kv, dim, window
        self.lengths, self.rows = list(lengths), list(rows or [1] * len(lengths))
        self.batch, self.packed = len(self.lengths), len(set(self.rows)) > 1
        shape = (sum(self.rows),) if self.packed else (self.batch, self.rows[0])
        self.q = bench.normal(*shape, heads, dim)
        self.out = torch.empty_like(self.q)
        self.used = torch.tensor(self.lengths, dtype=torch.int32, device=bench.device)
        ends = [sum(self.rows[:b]) for b in range(self.batch + 1)]
        self.options: Dict[str, Any] = {"max_seqlen_k": max(self.lengths), "window_size": (window, -1), "out": self.out}
        if self.packed:
            cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=bench.device)
            self.options.update(cu_seqlens_q=cu_seqlens, max_seqlen_q=max(self.rows))
        if sink:
            self.options["sink"] = bench.normal(heads)

    @property
    def pairs(self) -> int:
        """Visible pairs of a query row and a key, of one head."""
        rows = ((length - count + i + 1) for length, count in zip(self.lengths, self.rows) for i in range(count))
        return sum(min(seen, self.window + 1) if self.window >= 0 else seen for seen in rows)

    @property
    def flops(self) -> float:
        return 4.0 * self.heads * self.dim * self.pairs

    @property
    def moved(self) -> int:
        """Bytes of the K and V that rows see."""
        seen = (min(n, self.window + m) if self.window >= 0 else n for n, m in zip(self.lengths, self.rows))
        return sum(seen) * self.heads_kv * self.dim * 4

    def rotations(self, tokens: int) -> int:
        return max(1, min(ROTATIONS if self.moved > 1 << 27 else MOST_CALLS, len(self.bench.k) // (tokens * self.heads_kv * self.dim)))

    def cache(self, size: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """K and V of the pool, [pages or rows of a batch, size, heads_kv, dim]."""
        width = size * self.heads_kv * self.dim
        return tuple(x[: len(x) // width * width].view(-1, size, self.heads_kv, self.dim) for x in (self.bench.k, self.bench.v))  # type: ignore[return-value]

    def tables(self, page: int, pages: int) -> List[torch.Tensor]:
        """[B, columns] of each rotation: pages scattered over the pool, no page in two places."""
        counts = [-(-length // page) for length in self.lengths]
        turns = self.rotations(sum(counts) * page)
        order, at, tables = torch.randperm(pages).int(), 0, torch.zeros(turns, self.batch, max(counts), dtype=torch.int32)
        for turn in range(turns):
            for b, count in enumerate(counts):
                tables[turn, b, :count] = order[at : at + count]
                at += count
        return list(tables.to(self.bench.device))

    def paged(self, page: int, **more: Any) -> "Way":
        k, v = self.cache(page)
        tables = self.tables(page, len(k))

        def keys_of(b: int) -> Tuple[torch.Tensor, torch.Tensor]:
            rows = tables[0][b, : -(-self.lengths[b] // page)].long()
            return tuple(x[rows].flatten(0, 1)[: self.lengths[b]] for x in (k, v))  # type: ignore[return-value]

        return self.way(keys_of, [lambda t=table: self.attend(k, v, block_table=t, **more) for table in tables], **more)

    def contiguous(self, **more: Any) -> "Way":
        """A cache without pages, of the longest sequence's room for each."""
        k, v = self.cache(max(self.lengths))
        parts = [(k[at : at + self.batch], v[at : at + self.batch]) for at in self.parts(len(k))]
        return self.way(lambda b: (k[b, : self.lengths[b]], v[b, : self.lengths[b]]),
                        [lambda p=part: self.attend(*p, **more) for part in parts], **more)

    def without_cache(self) -> "Way":
        """Ordinary attention: sequences of one length."""
        calls = [lambda p=p: flash_dmattn_func(p.q, p.k, p.v, is_causal=True) for p in self.problems()]
        return Way(self, calls, lambda b: (self.problems()[0].k[b], self.problems()[0].v[b]))

    def peer(self, name: str) -> Dict[str, "Way"]:
        """The same by another library, where it is here and takes it."""
        peer, problems = PEERS[name], self.problems()
        if not self.bench.on_cuda or peer.missing() or peer.refuses(problems[0]):
            return {}
        return {name: Way(self, [peer.prepare(p) for p in problems], lambda b: (problems[0].k[b], problems[0].v[b]))}

    def problems(self) -> List[Problem]:
        k, v = self.cache(self.lengths[0])
        parts = ((k[at : at + self.batch], v[at : at + self.batch]) for at in self.parts(len(k)))
        return [Problem(self.q, *part, causal=self.rows[0] > 1) for part in parts]

    def parts(self, rows: int) -> range:
        turns = self.rotations(self.batch * max(self.lengths))
        return range(0, min(turns * self.batch, rows - self.batch + 1), self.batch)

    def attend(self, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        given = {"cache_seqlens": self.used, **self.options, **more}
        return flash_dmattn_with_kvcache_func(self.q, k, v, given.pop("key", None), given.pop("value", None), **given)

    def way(self, keys_of: Callable[[int], Tuple[torch.Tensor, torch.Tensor]], calls: List[Call], **more: Any) -> "Way":
        return Way(self, calls, keys_of, rotary=more.get("rotary"))

    def appends(self, rotary: bool) -> Dict[str, Any]:
        """Options of a call that appends the last key of each sequence."""
        new = {name: self.bench.normal(self.batch, 1, self.heads_kv, self.dim) for name in ("key", "value")}
        return {**new, "cache_seqlens": self.used - 1, **({"rotary": self.turns()} if rotary else {})}

    def turns(self) -> Tuple[torch.Tensor, torch.Tensor]:
        angle = torch.arange(max(self.lengths))[:, None] * 10000.0 ** (-torch.arange(self.dim // 2) / (self.dim // 2))
        return angle.cos().to(self.bench.device), angle.sin().to(self.bench.device)


class Way:
    """Calls that compute a case in one way; keys_of: K and V of a sequence in the first of them, None: nothing to check."""

    def __init__(self, of: Sequences, calls: List[Call],
                 keys_of: Optional[Callable[[int], Tuple[torch.Tensor, torch.Tensor]]] = None, rotary: Any = None) -> None:
        self.of, self.calls, self.keys_of, self.rotary = of, calls, keys_of, rotary

    def error(self) -> Optional[float]:
        """The largest difference of the last row of the first and the last sequence, by the row's largest value."""
        if self.keys_of is None:
            return None
        out = self.calls[0]().float()
        return max(self.error_of(out, b) for b in (0, self.of.batch - 1))

    def error_of(self, out: torch.Tensor, b: int) -> float:
        s = self.of
        last = (sum(s.rows[: b + 1]) - 1,) if s.packed else (b, s.rows[b] - 1)
        k, v = (x.float() for x in self.keys_of(b))  # type: ignore[misc]
        q = s.q[last].float()
        if self.rotary is not None:
            cosine, sine = (x[s.lengths[b] - 1] for x in self.rotary)
            one, two = q.chunk(2, -1)
            q = torch.cat((one * cosine - two * sine, one * sine + two * cosine), -1).bfloat16().float()
        if s.window >= 0:
            k, v = k[-s.window - 1 :], v[-s.window - 1 :]
        scores = torch.einsum("ghd,jgd->ghj", q.view(s.heads_kv, -1, s.dim), k) * s.dim**-0.5
        if "sink" in s.options:
            sinks = s.options["sink"].float().view(s.heads_kv, -1, 1)
            scores = torch.cat((scores, sinks), -1)
        shares = scores.softmax(-1)[..., : len(k)]
        want = torch.einsum("ghj,jgd->ghd", shares, v).flatten(0, 1)
        return float((out[last] - want).abs().max() / want.abs().max())


class Case:
    """Ways beside each other; the first is the one that others are compared with."""

    def __init__(self, name: str, ways: Dict[str, Way]) -> None:
        self.name, self.ways = name, ways


# ---- cases -----------------------------------------------------------------------------------------------------------


def decoding(bench: Bench, wanted: Callable[[str], bool]) -> List[Case]:
    cases = []

    def add(name: str, heads: int, heads_kv: int, dim: int, lengths: Sequence[int], pages: Sequence[int], more: str = "",
            **options: Any) -> None:
        if not wanted(name):
            return
        s = Sequences(bench, heads, heads_kv, dim, bench.keys(lengths), **options)
        ways = {CONTIGUOUS: s.contiguous(), **{f"page {page}": s.paged(page) for page in pages}}
        if "plain" in more:
            ways.update({"no cache": s.without_cache(), **s.peer("torch flash")})
        if "levels" in more:
            ways["page 64, level 1"] = s.paged(64, invariance=1)
        if "append" in more:
            ways["page 64, append"] = s.paged(64, **s.appends(False))
            ways["page 64, append, rotary"] = s.paged(64, **s.appends(True))
        cases.append(Case(name, ways))

    add("D1 B8 32/8 Sk 16384", 32, 8, 128, [16384] * 8, (1, 16, 64, 128, 256), "plain levels append")
    add("D2 B64 32/8 Sk 4096", 32, 8, 128, [4096] * 64, (16, 64, 128), "plain levels")
    add("D3 B1 32/8 Sk 131072", 32, 8, 128, [131072], (16, 64, 128), "plain levels")
    add("D3 B1 64/2 Sk 131072", 64, 2, 128, [131072], (16, 64, 128), "plain")
    add("D4 B1 32/8 Sk 1024", 32, 8, 128, [1024], (16, 64), "plain append")
    add("D5 8/1, 32 lengths", 8, 1, 128, UNEVEN, (16, 64, 128), "levels")
    add("D6 32/8, 32 lengths", 32, 8, 128, UNEVEN, (16, 64, 128), "levels")
    add("D7 B32 32/1 Sk 8192", 32, 1, 128, [8192] * 32, (16, 64, 128), "levels")
    add("D8 B32 64/8 D64 Sk 8192", 64, 8, 64, [8192] * 32, (16, 64, 128))
    add("D8 with sinks", 64, 8, 64, [8192] * 32, (64,), sink=True)
    add("D8 window 128", 64, 8, 64, [8192] * 32, (16, 64), window=127, sink=True)
    add("B16 32/8 Sk 8192", 32, 8, 128, [8192] * 16, (64,))
    add("B16 32/8 Sk 8192, 8 rows", 32, 8, 128, [8192] * 16, (64,), rows=[8] * 16)
    return cases


def prompts(bench: Bench, wanted: Callable[[str], bool]) -> List[Case]:
    cases = []
    for context in (0, 8192, 30720):
        name = f"P1 2048 rows behind {context}"
        if not wanted(name):
            continue
        length, rows = bench.keys([2048 + context, 2048])
        s = Sequences(bench, 32, 8, 128, [length], rows=[rows])
        ways = {CONTIGUOUS: s.contiguous(), **{f"page {page}": s.paged(page) for page in (1, 16, 64, 128)}}
        cases.append(Case(name, {**ways, "page 64, level 2": s.paged(64, invariance=2), "no cache": s.without_cache(), **s.peer("torch flash")}))
    return cases


def mixed(bench: Bench, wanted: Callable[[str], bool]) -> List[Case]:
    """Single rows and two chunks of prompts, in one call and in two."""
    cases = []
    for name, heads, heads_kv in (("M1 D6 and two chunks", 32, 8), ("M2 the same at 8/1", 8, 1)):
        if not wanted(name):
            continue
        lengths, (chunk, context) = bench.keys(UNEVEN), bench.keys([2048, 8192])
        chunks = [chunk, chunk + context]
        both = Sequences(bench, heads, heads_kv, 128, lengths + chunks, rows=[1] * 32 + [chunk] * 2)
        apart = [Sequences(bench, heads, heads_kv, 128, lengths), Sequences(bench, heads, heads_kv, 128, chunks, rows=[chunk] * 2)]
        first, second = (s.paged(64) for s in apart)
        in_turn = [lambda a=a, b=b: (a(), b()) for a, b in zip(first.calls, second.calls)]
        cases.append(Case(name, {"two calls": Way(both, in_turn), "one call": both.paged(64), "rows alone": first, "chunks alone": second}))
    return cases


def appending(bench: Bench, wanted: Callable[[str], bool]) -> List[Case]:
    name = "A1 append, B256 32/8"
    if not wanted(name):
        return []
    s = Sequences(bench, 32, 8, 128, bench.keys([2048] * 256))
    k, v = s.cache(16)
    table, turned = s.tables(16, len(k))[0], torch.empty_like(s.q)
    ways = {}
    for title, rotary in (("keys", False), ("keys and query turned", True)):
        new = s.appends(rotary)
        given = {**new, **({"query": s.q, "query_out": turned} if rotary else {})}
        ways[title] = Way(s, [lambda given=given: append_kv_cache(k, v, block_table=table, **given)])
    return [Case(name, ways)]


# ---- times -----------------------------------------------------------------------------------------------------------


def graph_of(calls: List[Call], times: int) -> Call:
    """Something that makes so many calls, the given ones in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(times):
            calls[n % len(calls)]()
    return graph.replay


def once(bench: Bench, run: Call) -> float:
    """Microseconds."""
    if not bench.on_cuda:
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def times_of(bench: Bench, ways: Dict[str, List[Call]], expected: Dict[str, float]) -> Dict[str, Dict[str, Any]]:
    """Microseconds a call of each way; expected: about how long one takes."""
    runs, counts = {}, {}
    for name, calls in ways.items():
        counts[name] = max(4, min(MOST_CALLS, math.ceil(1500 / expected[name]))) if bench.on_cuda else 1
        runs[name] = graph_of(calls, counts[name]) if bench.on_cuda else calls[0]
    samples: Dict[str, List[float]] = {name: [] for name in ways}
    for turn in range(bench.rounds + 2):
        for name, run in runs.items():
            took = once(bench, run) / counts[name]
            if turn >= 2:
                samples[name].append(took)
    found = {}
    for name, values in samples.items():
        low, median, high = statistics.quantiles(values, n=4)
        found[name] = {"us": round(median, 2), "quartiles": [round(low, 2), round(high, 2)], "samples": [round(value, 2) for value in values]}
    return found


def copy_rate(bench: Bench) -> float:
    """Bytes a microsecond, read and written, of a copy of 512 MiB, by parts in turn."""
    size = (1 << 27) // bench.part
    calls = [lambda n=n: target[n].copy_(source[n]) for n in range(2)]
    source, target = (torch.empty(2, size, dtype=torch.bfloat16, device=bench.device) for _ in range(2))
    took = times_of(bench, {"copy": calls}, {"copy": 130.0})["copy"]["us"]
    return size * 4 / took


def measure(bench: Bench, case: Case, copied: float) -> List[Dict[str, Any]]:
    expected = {name: max(2.0, way.of.moved / 4e6, way.of.flops / 5e8) for name, way in case.ways.items()}
    found = times_of(bench, {name: way.calls for name, way in case.ways.items()}, expected)
    base = next(iter(found.values()))["us"]
    rows = []
    for name, way in case.ways.items():
        us = found[name]["us"]
        rates = {"tb_s": round(way.of.moved / us / 1e6, 3), "of_copy": round(way.of.moved / us / copied, 3), "tflops": round(way.of.flops / us / 1e6, 1)}
        if case.name.startswith("A1"):
            rates = {}
        rows.append({"case": case.name, "way": name, "bytes": way.of.moved, **found[name], **rates, "of_first": round(us / base, 3)})
    return rows


def host_times(bench: Bench) -> Dict[str, float]:
    """Microseconds of the host for a call of a few rows, without waiting."""
    s = Sequences(bench, 32, 8, 128, [64] * 4)
    k, v = s.cache(16)
    table, new = s.tables(16, len(k))[0], s.appends(True)
    part = k[:4].contiguous(), v[:4].contiguous()
    actions: Dict[str, Call] = {
        "no cache": lambda: flash_dmattn_func(s.q, *part),
        "pages": lambda: s.attend(k, v, block_table=table),
        "pages, append, rotary": lambda: s.attend(k, v, block_table=table, **new),
        "append alone": lambda: append_kv_cache(k, v, block_table=table, **new),
    }
    calls = 200 if bench.on_cuda else 5
    found: Dict[str, List[float]] = {name: [] for name in actions}
    for _ in range(9):
        for name, action in actions.items():
            found[name].append(microseconds(action, calls, bench.wait))
    return {name: round(statistics.median(values), 2) for name, values in found.items()}


def first_calls(bench: Bench, cases: List[Case]) -> List[str]:
    """Makes each way's first call, whose kernels are compiled side by side; ways that fail are taken out and named."""

    def first(way: Way) -> Optional[str]:
        try:
            way.calls[0]()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    failed, ways = [], [(case, name) for case in cases for name in case.ways]
    with ThreadPoolExecutor(8 if bench.on_cuda else 1) as pool:
        errors = list(pool.map(lambda way: first(way[0].ways[way[1]]), ways))
    for (case, name), error in zip(ways, errors):
        if error is not None:
            failed.append(f"{case.name}, {name}: {error}")
            del case.ways[name]
    bench.wait()
    cases[:] = [case for case in cases if case.ways]
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--only", nargs="+", default=[], help="cases whose names begin so")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    bench = Bench(arguments.device, arguments.rounds)

    def wanted(name: str) -> bool:
        return not arguments.only or any(name.startswith(each) for each in arguments.only)

    cases = [case for make in (decoding, prompts, mixed, appending) for case in make(bench, wanted)]
    failed = first_calls(bench, cases)
    for line in failed:
        print(f"FAILED {line}", flush=True)
    print(f"{len(cases)} cases, ready after {time.perf_counter() - begin:.1f} s", flush=True)
    copied, rows, wrong = copy_rate(bench), [], 0
    print(f"copy {copied / 1e6:.3f} TB/s", flush=True)
    for case in cases:
        errors = {name: way.error() for name, way in case.ways.items()}
        for row in measure(bench, case, copied):
            error = errors[row["way"]]
            row["error"] = None if error is None else round(error, 5)
            is_wrong = error is not None and not error < WRONG
            wrong += is_wrong
            rows.append(row)
            shown = "".join(f" {row[name]:9.3f}" for name in ("tb_s", "of_copy", "tflops") if name in row)
            print(f"{case.name:28s} {row['way']:26s} {row['us']:10.2f} us{shown} {row['of_first']:7.3f}{'  WRONG' * is_wrong}", flush=True)
    hosts = host_times(bench)
    print("host, us a call:", hosts)
    name = torch.cuda.get_device_name() if bench.on_cuda else "cpu"
    result = {"command": " ".join(["bench/bench_serving.py", *sys.argv[1:]]), "commit": arguments.commit or commit(), "device": name,
              "torch": torch.__version__, "copy_tb_s": round(copied / 1e6, 4), "seconds": round(time.perf_counter() - begin, 1),
              "host_us": hosts, "failed": failed, "rows": rows}
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
    print(f"{result['seconds']} s, {wrong} wrong, {len(failed)} failed")
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
