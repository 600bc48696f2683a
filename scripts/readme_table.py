#!/usr/bin/env python3
"""readme_table.py: writes the measured table of README.md, between "<!-- measured -->" and its end, from bench/results.

Ratios are a peer's time over ours: the geometric mean, and in brackets the least. Usage: readme_table.py [--check].
--check: says whether the page has the table of the results.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
import textwrap

import bench_table
import cuda_table
import marked_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
CUDA = RESULTS / "nvidia-h200"
CELLS, MASKS = ("forward", "backward"), ("masks", "backward-features")  # questions that the rows of CUDA answer
CPUS = {"amd-epyc-zen5-2core": "AMD EPYC (Zen 5)", "intel-xeon-amx-2core": "Intel Xeon"}


def newest(name: str) -> pathlib.Path:
    return max(CUDA.glob(f"????-??-??-{name}.json"))


def results(name: str) -> list:
    return json.loads(newest(name).read_text())["results"]


def ratio_of(ratios: list) -> str:
    return f"**{statistics.geometric_mean(ratios):.2f}x** ({min(ratios):.2f}x)"


def best_peer_ratios(name: str, peers: set) -> list:
    """Of each cell of the set `name` the time of its fastest peer over ours; adds the peers' names to `peers`."""
    ratios = []
    for result in results(name):
        here = set(result["seconds"]) - {cuda_table.OURS, cuda_table.COPY}
        if result["set"] == name and here:
            peers |= here
            fastest = min(cuda_table.milliseconds(result, peer) for peer in here)
            ratios.append(fastest / cuda_table.milliseconds(result, cuda_table.OURS))
    return ratios


def masked_ratio(file: str, name: str, suffix: str) -> str:
    """Of the set `name` our time of a causal problem over that of the same problem with a top-512 mask."""
    here = (result for result in results(file) if result["set"] == name)
    times = {result["title"]: cuda_table.milliseconds(result, cuda_table.OURS) for result in here}
    causal = "B1 H16 S8192 D128 bfloat16 causal"
    return f"**{times[causal + suffix] / times[f'{causal} top-512{suffix}']:.2f}x**"


def cpu_row(folder: str, title: str) -> list:
    grid = bench_table.load(RESULTS / folder, "grid.json")
    rows = [row for row in bench_table.cells(grid) if row[0]["dtype"] == "bf16"]
    ratios = {p: [ratio for _, direction, _, ratio, _ in rows if direction == p] for p in ("forward", "backward")}
    device = f"{title}, {grid['device']['num_threads']} cores, `{grid['device']['isa']}`"
    return [device, f"{len(ratios['forward'])} cells", "torch SDPA", *map(ratio_of, ratios.values())]


def table() -> str:
    peers: set = set()
    forward, backward = (best_peer_ratios(name, peers) for name in CELLS)
    best = "the fastest of " + ", ".join(peer for peer in cuda_table.PEERS if peer in peers)
    rows = [
        ["device", "bfloat16", "beside", "forward", "backward"],
        ["---"] * 5,
        ["NVIDIA H200", f"{len(forward)} cells", best, ratio_of(forward), ratio_of(backward)],
        ["NVIDIA H200", "top-512 of 8192 keys, causal", "our causal kernels",
         masked_ratio(MASKS[0], "intervals", ""), masked_ratio(MASKS[1], "backward-intervals", " backward")],
        *(cpu_row(folder, title) for folder, title in CPUS.items()),
    ]
    files = [newest(name).relative_to(ROOT) for name in CELLS + MASKS] + [f"bench/results/{name}/grid.json" for name in CPUS]
    origin = textwrap.fill("From " + ", ".join(f"`{file}`" for file in files) + ".", 120, break_on_hyphens=False)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows) + f"\n{origin}\n"


def main(arguments: list[str]) -> int:
    page = ROOT / "README.md"
    old = page.read_text()
    new, count = marked_table.replaced(old, "measured", table())
    if count != 1 or ("--check" in arguments and new != old):
        print("README.md: its table is not that of bench/results; run scripts/readme_table.py", file=sys.stderr)
        return 1
    if new != old:
        page.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
