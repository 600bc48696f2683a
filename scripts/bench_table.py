#!/usr/bin/env python3
"""bench_table.py: writes the measured tables of docs/measured-cpu.md from the results of scripts/measure.sh.

Replaces what stands between "<!-- measured DEVICE -->" and "<!-- end of measured DEVICE -->". Usage: bench_table.py
bench/results/DEVICE
"""

import json
import math
import pathlib
import sys
import textwrap

import marked_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS, OURS, READ = ("sdpa-flash", "sdpa-math"), "flash-dmattn", "memory-read"


def load(folder: pathlib.Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def cells(result: dict) -> list:
    """(cell, pass, our GFLOP/s, ratio to the peer, our times); the peer is torch's flash kernel, or where that does not take
    the problem the math one."""
    rows = []
    for record in result["records"]:
        times = record["results"]
        peer = next((peer for peer in PEERS if peer in times), None)
        if OURS in times and peer:
            ratio = times[peer]["median_ms"] / times[OURS]["median_ms"]
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
             "pair_bias.json": "bias of every pair",
             "pair_bias_gradient.json": "bias of every pair, with its gradient; the peer is torch's math kernel",
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


def short_table(folder: pathlib.Path) -> str:
    """Of every cell of short sequences the geometric mean and the least ratio, by dtype and pass."""
    if not (folder / "short.json").exists():
        return ""
    text = means_table(cells(load(folder, "short.json")))
    return f"\nShort sequences, B 1 and 8, H 4 and 16, S 64 to 512, D 64 and 128, causal and not:\n\n{text}"


def decode_table(folder: pathlib.Path) -> str:
    """One query row beside the same bytes read in order."""
    records = load(folder, "decode.json")["records"] if (folder / "decode.json").exists() else []
    rows = [record for record in records if READ in record["results"]]
    text = "\nOne query row beside the same bytes of K and V read in order in the same run:\n\n"
    text += "| dtype | threads | ours, GB/s | memory, GB/s | share |\n|---|---|---|---|---|\n"
    for record in rows:
        cell, times = record["cell"], record["results"]
        size = 2 * cell["B"] * cell["Hkv"] * cell["Sk"] * cell["D"] * (4 if cell["dtype"] == "fp32" else 2)
        ours, memory = (size / times[name]["median_ms"] * 1e-6 for name in (OURS, READ))
        text += f"| {cell['dtype']} | {cell['threads'] or 'all'} | {ours:.1f} | {memory:.1f} | {ours / memory:.0%} |\n"
    return text if rows else ""


def peak_table(folder: pathlib.Path) -> str:
    """float32 forward on one thread, by instruction set, beside the peak of multiply-adds."""
    if not (folder / "peaks.json").exists():
        return ""
    peaks = load(folder, "peaks.json")
    text = "\nfloat32 forward on one thread at S 4096, beside the peak of one core's multiply-adds (`bench/cpu_ceilings.c`):\n\n"
    text += "| instruction set | D | GFLOP/s | peak | share |\n|---|---|---|---|---|\n"
    for isa, peak in ((isa, peak) for isa, peak in peaks.items() if peak):
        for cell, direction, speed, _, _ in cells(load(folder, f"isa_{isa}.json")):
            text += f"| `{isa}` | {cell['D']} | {speed:.0f} | {peak:.0f} | {speed / peak:.0%} |\n"
    return text


def replace(path: pathlib.Path, device: str, text: str) -> None:
    page, places = marked_table.replaced(path.read_text(), f"measured {device}", text)
    if not places:
        sys.exit(f"{path.name} has no place for {device}: <!-- measured {device} --> and its end")
    path.write_text(page)


def main() -> None:
    folder = pathlib.Path(sys.argv[1]).resolve()
    grid = load(folder, "grid.json")
    rows = cells(grid)
    device = grid["device"]
    where = (f"{grid['date'][:10]}, {device['cpu']}, {device['num_threads']} cores, best instruction set `{device['isa']}`, "
             f"torch {grid['versions']['torch']} SDPA (its flash kernel), B 1, H = 512/D, both in one run, interleaved, medians; "
             f"commit `{grid['commit'][:10]}`; raw samples in `{folder.relative_to(ROOT)}`, where each file names its own commit.")
    where = textwrap.fill(where, 120, break_long_words=False, break_on_hyphens=False)
    replace(ROOT / "docs/measured-cpu.md", folder.name, f"## {device['cpu']}, `{device['isa']}`\n\n{where}\n\n" + means_table(rows) + "\n" +
            grid_table(rows, "forward") + "\n" + grid_table(rows, "backward") + "\n" + extra_table(folder) +
            short_table(folder) + decode_table(folder) + peak_table(folder))


if __name__ == "__main__":
    main()
