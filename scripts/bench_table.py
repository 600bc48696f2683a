#!/usr/bin/env python3
"""bench_table.py: writes the measured tables of README.md and docs/cpu.md from the results of scripts/measure.sh.

Replaces what stands between "<!-- measured -->" and "<!-- end of measured -->". Usage: bench_table.py bench/results/DEVICE
"""

import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEER, OURS = "sdpa-flash", "flash-dmattn"


def load(folder: pathlib.Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def cells(result: dict) -> list:
    """(cell, pass, our GFLOP/s, ratio to the peer)"""
    rows = []
    for record in result["records"]:
        times = record["results"]
        if OURS in times and PEER in times:
            ratio = times[PEER]["median_ms"] / times[OURS]["median_ms"]
            rows.append((record["cell"], record["pass"], times[OURS]["tflops"] * 1e3, ratio, times[OURS]))
    return rows


def mean(ratios: list) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def grid_table(rows: list, direction: str) -> str:
    lengths = sorted({cell["Sq"] for cell, *_ in rows})
    text = f"| {direction} | D | causal | " + " | ".join(f"S {s}" for s in lengths) + " |\n"
    text += "|---|---|---|" + "---|" * len(lengths) + "\n"
    for dtype in ("fp32", "bf16", "fp16"):
        for d in sorted({cell["D"] for cell, *_ in rows}):
            for causal in (False, True):
                line = []
                for s in lengths:
                    found = [(speed, ratio) for cell, p, speed, ratio, _ in rows if p == direction and (cell["dtype"], cell["D"],
                             cell["causal"], cell["Sq"]) == (dtype, d, causal, s)]
                    line.append(f"{found[0][0]:.0f} (**{found[0][1]:.2f}x**)" if found else "")
                text += f"| {dtype} | {d} | {'yes' if causal else 'no'} | " + " | ".join(line) + " |\n"
    return text


def means_table(rows: list) -> str:
    text = "| dtype | forward, geometric mean (least cell) | backward, geometric mean (least cell) |\n|---|---|---|\n"
    for dtype in ("fp32", "bf16", "fp16"):
        line = []
        for direction in ("forward", "backward"):
            ratios = [ratio for cell, p, _, ratio, _ in rows if p == direction and cell["dtype"] == dtype]
            line.append(f"**{mean(ratios):.2f}x** ({min(ratios):.2f}x)" if ratios else "")
        text += f"| {dtype} | " + " | ".join(line) + " |\n"
    return text


def extra_table(folder: pathlib.Path) -> str:
    names = {"after_torch.json": "right after a torch operation", "dense_mask.json": "dense bool mask, half visible",
             "key_bias.json": "per-key bias, causal", "topk.json": "top-512 of 8192 by key intervals; the peer gets a dense additive mask",
             "decode.json": "decode: 1 row, H 32 / 8, 32768 keys"}
    text = "| problem | dtype | D | S | pass | ours, ms | ratio to torch |\n|---|---|---|---|---|---|---|\n"
    for name, title in names.items():
        if not (folder / name).exists():
            continue
        for cell, direction, _, ratio, ours in cells(load(folder, name)):
            causal = " causal" if cell["causal"] and "causal" not in title and "decode" not in title else ""
            text += (f"| {title}{causal} | {cell['dtype']} | {cell['D']} | {cell['Sk']} | {direction} | "
                     f"{ours['median_ms']:.2f} | {ratio:.2f}x |\n")
    return text


def replace(path: pathlib.Path, text: str) -> None:
    begin, end = "<!-- measured -->", "<!-- end of measured -->"
    page = path.read_text()
    if end not in page:
        page = page.replace(begin, f"{begin}\n{end}")
    page = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: f"{begin}\n{text}{end}", page, flags=re.S)
    path.write_text(page)


def main() -> None:
    folder = pathlib.Path(sys.argv[1]).resolve()
    grid = load(folder, "grid.json")
    rows = cells(grid)
    device = grid["device"]
    where = (f"{grid['date'][:10]}, {device['cpu']}, {device['num_threads']} cores, best instruction set `{device['isa']}`, "
             f"torch {grid['versions']['torch']} SDPA (its flash kernel), B 1, H = 512/D, both in one run, interleaved, medians; "
             f"commit `{grid['commit'][:10]}`; raw samples in `{folder.relative_to(ROOT)}`, where each file names its own commit.\n\n")
    replace(ROOT / "README.md", "Ratio to torch SDPA, more is faster. " + where + means_table(rows) +
            "\nEvery cell, masks, decode and what bounds them: [docs/cpu.md](docs/cpu.md).\n")
    replace(ROOT / "docs/cpu.md", "## Measured\n\nGFLOP/s (4 B H S S D, halved when causal, backward x 2.5) and ratio to torch. " + where +
            grid_table(rows, "forward") + "\n" + grid_table(rows, "backward") + "\n" + extra_table(folder))


if __name__ == "__main__":
    main()
