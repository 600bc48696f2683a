#!/usr/bin/env python3
"""cuda_table.py: writes the measured tables of docs/measured.md from a result of
`python -m flash_dmattn.bench --device cuda --json FILE`.

Replaces what stands between "<!-- cuda measured -->" and "<!-- end of cuda measured -->"; for a result of the
backward's sets alone, "cuda backward measured"; for the set "decode" alone, "decode measured"; with --portable,
"portable measured" and "portable backward measured" (the mma family); for the sets "selection" and "tiles", "selection
measured" and "tiles measured" of docs/lab/backward_choice.md. A result of `fdm bench --show-all` at several head dims
(a list "rows") goes between "<!-- textbook measured -->" and its end in docs/lab/textbook.md.
Usage: cuda_table.py FILE [--portable]
"""

from __future__ import annotations

import importlib.util
import json
import math
import pathlib
import re
import statistics
import sys
import textwrap

import marked_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("bench_report", ROOT / "bench" / "bench_report.py")
bench_report = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bench_report)
OURS, COPY = bench_report.OURS, bench_report.COPY


def milliseconds(result: dict, name: str) -> float:
    return statistics.median(result["seconds"][name]) * 1e3


def ratio(result: dict, peer: str) -> str:
    return f"{milliseconds(result, peer) / milliseconds(result, OURS):.2f}x" if peer in result["seconds"] else ""


def of_backward(data: dict) -> bool:
    return all(result["set"].startswith("backward") for result in data["results"])


PEERS = ("torch flash", "torch efficient", "torch cudnn", "torch math", "flex", "flash-attn 2", "flash-attn 3", "flash-attn 4")


def shown(ratios: list, bold: str = "") -> str:
    return f"{bold}{math.exp(statistics.fmean(map(math.log, ratios))):.2f}x{bold} ({min(ratios):.2f}x)" if ratios else ""


def summary(data: dict) -> str:
    """One row a set, one column a peer: the geometric mean and the least of peer time over ours."""
    names = {"forward": "36 cells: bf16, D 64, 128, 256, S 512 to 16384, causal and not, 16384 tokens",
             "shapes": "bf16, nine other shapes: D 64 to 256, S 768 to 5000, with groups of heads",
             "fp16": "fp16, B1 H8 S8192 D64", "wide": "fp16, D 512 and 1024", "scores": "bf16, dense bias or mask, D 128",
             "decode": "bf16, one to four query rows: groups, padding, top-W, D 128 and 256"}
    names["backward"] = names["forward"]
    names["backward-scores"] = "bf16, dense bias with its gradient, or mask, B1 H16 S8192 D128"
    names["backward-intervals"] = "bf16, causal, B1 H16 S8192 D128"
    names["backward-shapes"] = names["shapes"]
    names["backward-groups"] = "bf16, 32 heads of 1 and 4 KV heads, B1, D 64 and 128, S 1024 to 4096, causal and not"
    peers = [peer for peer in PEERS if any(peer in r["seconds"] for r in data["results"])]
    text = f"| {'backward' if of_backward(data) else 'forward'} | the best of them, case by case | {' | '.join(peers)} |\n"
    text += f"|{'---|' * (len(peers) + 2)}\n"
    for name, title in names.items():
        here = [r for r in data["results"] if r["set"] == name and set(r["seconds"]) - {OURS, COPY}]
        if not here:
            continue
        best = [min(milliseconds(r, peer) for peer in r["seconds"] if peer not in (OURS, COPY)) / milliseconds(r, OURS) for r in here]
        of_peers = [[milliseconds(r, peer) / milliseconds(r, OURS) for r in here if peer in r["seconds"]] for peer in peers]
        text += f"| {title} | {shown(best, '**')} | {' | '.join(map(shown, of_peers))} |\n"
    return text


def cells(data: dict) -> str:
    text = "| case | ms | TFLOPS | torch flash | torch efficient | torch cudnn | flash-attn 4 |\n|---|---|---|---|---|---|---|\n"
    for r in data["results"]:
        ours = milliseconds(r, OURS)
        speed = f"{r['flops'] / ours / 1e9:.0f}" if r["set"] not in ("decode", "intervals", "backward-intervals") else ""
        text += (f"| {r['title']} | {ours:.3f} | {speed} | {ratio(r, 'torch flash')} | {ratio(r, 'torch efficient')} "
                 f"| {ratio(r, 'torch cudnn')} | {ratio(r, 'flash-attn 4')} |\n")
    return text


def decode(data: dict) -> str:
    """Of one query row the speed of what it moves, beside a copy of as many bytes and one of 2 GiB."""
    text = ("| case | us | TB/s | of a copy of as many bytes | of a copy of 2 GiB | torch flash | torch efficient | torch cudnn |\n"
            f"|{'---|' * 8}\n")
    ours = [row for row in bench_report.rows(data) if row["contender"] == OURS]
    for r, row in zip(data["results"], ours):
        speed = ["", "", ""]
        if row["tb_per_s"]:
            of_large = row["tb_per_s"] * 1e12 / data["ceilings"]["copy_bytes_per_second"]
            speed = [f"{row['tb_per_s']:.2f}", f"**{row['share_of_copy']:.2f}**", f"{of_large:.2f}"]
        peers = [ratio(r, peer) for peer in ("torch flash", "torch efficient", "torch cudnn")]
        text += f"| {r['title']} | {row['median_ms'] * 1e3:.1f} | {' | '.join(speed + peers)} |\n"
    return text


def named(data: dict) -> str:
    """Best variant of each kernel at each head dim, of those that sum in float32."""
    rows = [row for row in data["rows"] if not row["choice"].endswith("_F16Acc")]
    dims = sorted({row["head_dim"] for row in rows})
    text = f"| TFLOPS | {' | '.join(f'D {dim}' for dim in dims)} |\n|{'---|' * (len(dims) + 1)}\n"
    names = {row["kernel"] for row in rows}
    for name in sorted(names, key=lambda name: max(r["tflops"] for r in rows if r["kernel"] == name)):
        text += f"| `{name}` |"
        for dim in dims:
            here = (row for row in rows if (row["kernel"], row["head_dim"]) == (name, dim))
            best = max(here, key=lambda row: row["tflops"], default=None)
            text += f" {best['tflops']:.0f} ({variant(name, best['choice'])}) |" if best else " |"
        text += "\n"
    return text


# ---- the backward's selection ----------------------------------------------------------------------------------------

LONG = 8192


def cell(result: dict) -> tuple:
    """(head dim, batch, query rows, causal) of a case's title."""
    found = {letter: int(number) for letter, number in re.findall(r"\b([BSD])(\d+)", result["title"])}
    return found["D"], found["B"], found["S"], " causal" in result["title"]


def ratios(results: list, name: str) -> list:
    return [milliseconds(r, name) / milliseconds(r, OURS) for r in results if name in r["seconds"]]


def mean(values: list) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def contenders(data: dict) -> list:
    return [name for name in dict.fromkeys(name for r in data["results"] for name in r["seconds"]) if name != OURS]


def least_low(result: dict) -> dict:
    """With the faster of the two places of V as one more contender."""
    both = [name for name in ("low memory", "V shared") if name in result["seconds"]]
    return result | {"seconds": result["seconds"] | {"faster of both": result["seconds"][
        min(both, key=lambda name: milliseconds(result, name))]}}


def selection(data: dict) -> str:
    """Geometric mean and least of each contender's time over ours, by length and head dim; then every cell."""
    results = [least_low(r) for r in data["results"]]
    names = ["low memory", "V shared", "faster of both", "old rule", "old rule bare"]
    dims = sorted({cell(r)[0] for r in results})
    text = ""
    for title, wanted in ((f"S {LONG} and more", lambda s: s >= LONG), ("shorter", lambda s: s < LONG)):
        text += f"| {title} | {' | '.join(f'D {d}' for d in dims)} | all | least |\n|{'---|' * (len(dims) + 3)}\n"
        here = [r for r in results if wanted(cell(r)[2])]
        for name in names:
            of_dims = [ratios([r for r in here if cell(r)[0] == d], name) for d in dims]
            every = ratios(here, name)
            text += (f"| {name} | {' | '.join(f'{mean(each):.2f}x' if each else '' for each in of_dims)} | {mean(every):.2f}x "
                     f"| {min(every):.3f}x |\n")
        text += "\n"
    text += f"| case | chosen | ms | {' | '.join(n for n in names if n != 'faster of both')} |\n|{'---|' * 7}\n"
    for r in results:
        shown = [f"{milliseconds(r, n) / milliseconds(r, OURS):.3f}x" if n in r["seconds"] else "" for n in names
                 if n != "faster of both"]
        title = r["title"].replace(" bfloat16", "").replace(" backward", "")
        text += f"| {title} | `{r['plans'][OURS]['choice']}` | {milliseconds(r, OURS):.3f} | {' | '.join(shown)} |\n"
    return text


def tiles(data: dict) -> str:
    """Of every tile the geometric mean of its time over that of the choice, and the least, by head dim."""
    dims = sorted({cell(r)[0] for r in data["results"]})
    text = f"| tile | {' | '.join(f'D {d}' for d in dims)} |\n|{'---|' * (len(dims) + 1)}\n"
    for name in contenders(data):
        of_dims = [ratios([r for r in data["results"] if cell(r)[0] == d], name) for d in dims]
        shown = [f"{mean(each):.2f}x ({min(each):.3f})" if each else "" for each in of_dims]
        text += f"| `{name}` | {' | '.join(shown)} |\n"
    return text


def paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n\n"


def variant(kernel: str, choice: str) -> str:
    """What a choice code says beyond the kernel's name: "S2 Pad" of MMA_SplitQ_S2_Pad."""
    rest = choice.split("_")
    letters = re.sub("[^a-z]", "", kernel)
    while rest and letters:
        letters = letters.removeprefix(rest.pop(0).lower())
    return " ".join(rest)


def replace(page: pathlib.Path, what: str, body: str) -> None:
    page.write_text(marked_table.replaced(page.read_text(), what, body)[0])


def main() -> None:
    path = pathlib.Path(sys.argv[1])
    data = json.loads(path.read_text())
    if "rows" in data:
        facts = data["facts"]
        origin = (f"{facts['device']}, {facts['date']}, `{facts['command']}`, commit {facts['commit'][:7]}; "
                  f"`{path.resolve().relative_to(ROOT)}` holds every variant.")
        replace(ROOT / "docs/lab/textbook.md", "textbook measured", paragraph(origin) + named(data))
        return
    facts, limits = data["facts"], data["ceilings"]
    date = re.match(r"[\d-]{10}", path.name)
    origin = (f"{facts['device']}, {date[0] if date else 'date unknown'}, driver {facts['driver']}, torch {facts['torch']}; copy "
              f"{limits['copy_bytes_per_second'] / 1e12:.2f} TB/s and bfloat16 product "
              f"{limits['product_flops'] / 1e12:.0f} TFLOPS in the same run; commit {facts['commit'][:7]}; "
              f"`{path.resolve().relative_to(ROOT)}`. ")
    meaning = paragraph(origin + "Peer time over ours, geometric mean and in brackets the least: above 1 we are faster.")
    sets = {result["set"] for result in data["results"]}
    if sets in ({"selection"}, {"tiles"}):
        name = sets.pop()
        body = paragraph(origin + "Ratios are their time over ours.") + (selection if name == "selection" else tiles)(data)
        replace(ROOT / "docs/lab/backward_choice.md", f"{name} measured", body)
        return
    if sets == {"decode"}:
        replace(ROOT / "docs/measured.md", "decode measured", meaning + decode(data))
        return
    family = "portable" if "--portable" in sys.argv[2:] else "cuda"
    name = f"{family} backward measured" if of_backward(data) else f"{family} measured"
    replace(ROOT / "docs/measured.md", name, meaning + summary(data) + "\n" + cells(data))


if __name__ == "__main__":
    main()
