#!/usr/bin/env python3
"""companions_table.py: writes the tables of docs/measured-companions.md from the results of bench/companions.py under
bench/results/nvidia-h200/, between "<!-- gemm measured -->" and its end, and the same of softmax.

Usage: companions_table.py [--check | --plot]. --check: says whether the page has the tables of the results; --plot: also
docs/images/gemm.png and docs/images/softmax.png (needs matplotlib).
"""

from __future__ import annotations

import json
import math
import pathlib
import statistics
import sys
import textwrap

import marked_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "bench/results/nvidia-h200"
PAGE = ROOT / "docs/measured-companions.md"
LADDER = 5  # kernels of a case that is one
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def result(name: str) -> tuple:
    path = max(FOLDER.glob(f"????-??-??-{name}.json"))
    return json.loads(path.read_text()), path


def origin(data: dict, path: pathlib.Path) -> str:
    text = (f"On an {data['device'].removeprefix('NVIDIA ')}, {path.name[:10]}, commit {data['commit'][:7]}, `{data['command']}`; "
            f"medians; samples: `{path.relative_to(ROOT)}`.")
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n\n"


def table(head: list, rows: list) -> str:
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in [head, *rows]).replace("\n", f"\n|{'---|' * len(head)}\n", 1) + "\n"


def seconds(case: dict, name: str) -> float | None:
    found = case["seconds"].get(name)
    return found if isinstance(found, float) else None


def ratio(over: float | None, under: float | None) -> str:
    return f"{over / under:.2f}" if over and under else ""


# ---- gemm ------------------------------------------------------------------------------------------------------------


def tflops(case: dict, name: str) -> float:
    return 2e-12 * case["m"] * case["n"] * case["k"] / case["seconds"][name]


def is_square(case: dict) -> bool:
    return case["m"] == case["n"] == case["k"]


def rungs(case: dict) -> list:
    """Names of the ladder in the order of the file, cuBLAS last."""
    return [*(name for name in case["seconds"] if name.startswith("gemm.") and " " not in name and seconds(case, name)), "torch"]


def gemm_ladder(cases: list) -> str:
    here = [case for case in cases if len(rungs(case)) > LADDER]
    rows, last = [], {}
    for name in rungs(here[0]) if here else []:
        row = ["cuBLAS" if name == "torch" else f"`{name}`"]
        for case in here:
            speed, before = tflops(case, name), last.get(case["dtype"])
            row.append(f"{speed:.1f}" + (f" ({speed / before - 1:+.0%})" if before else ""))
            last[case["dtype"]] = speed
        rows.append(row)
    titles = [f"{SHORT[case['dtype']]}, {case['m']}" for case in here]
    return table(["TFLOPS (beside the rung before)", *titles], rows) if here else ""


def gemm_sizes(cases: list) -> str:
    dtypes = ("bfloat16", "float16")
    squares = {(case["dtype"], case["m"]): case for case in cases if is_square(case)}
    rows = []
    for size in sorted({size for _, size in squares}):
        row = [size]
        for case in (squares.get((dtype, size)) for dtype in dtypes):
            row += [f"{tflops(case, 'ours'):.0f}", f"{tflops(case, 'torch'):.0f}", f"{case['of_torch']:.3f}"] if case else [""] * 3
        rows.append(row)
    shares = [case["of_torch"] for case in squares.values()]
    text = table(["square", *(f"{SHORT[d]} {what}" for d in dtypes for what in ("TFLOPS", "cuBLAS", "share"))], rows)
    return text + f"Share of cuBLAS: geometric mean {statistics.geometric_mean(shares):.3f}, least {min(shares):.3f}.\n\n"


def gemm_few_rows(cases: list) -> str:
    rows = [[case["m"], f"{case['n']}, {case['k']}", f"{case['seconds']['ours'] * 1e6:.1f}", f"{case['seconds']['torch'] * 1e6:.1f}",
             f"{case['of_torch']:.2f}", f"{case['of_copy']:.2f}"] for case in cases if "of_copy" in case]
    return table(["rows", "n, k", "us", "cuBLAS", "share", "of a copy's bytes a second"], rows) if rows else ""


def gemm_portable(cases: list) -> str:
    """Of every square gemm.mma-tma, and its share of gemm.hopper's speed, each run alone."""
    squares = {(case["dtype"], case["m"]): case for case in cases if is_square(case)}
    kinds = [(dtype, layout) for dtype in ("bfloat16", "float16") for layout in ("", " NN")]
    rows = [[size, *(each for dtype, layout in kinds for each in (f"{tflops(squares[dtype, size], f'gemm.mma-tma{layout} alone'):.0f}",
                                                                  f"{squares[dtype, size][f'portable_of_hopper{layout}']:.3f}"))]
            for size in sorted({size for _, size in squares})]
    titles = [f"{SHORT[dtype]}{layout}{what}" for dtype, layout in kinds for what in (" TFLOPS", " share")]
    text = table(["square", *titles], rows)
    for layout, title in (("", "B's columns contiguous"), (" NN", "B's rows contiguous (NN)")):
        shares = [case[f"portable_of_hopper{layout}"] for case in squares.values()]
        text += f"{title}: geometric mean {statistics.geometric_mean(shares):.3f}, least {min(shares):.3f}. "
    return text.rstrip() + "\n\n"


def gemm_page(data: dict) -> str:
    cases = data["cases"]
    return (gemm_sizes(cases) + gemm_few_rows(cases) + gemm_ladder(cases) +
            "`gemm.mma-tma` beside `gemm.hopper`, each alone:\n\n" + gemm_portable(cases))


# ---- softmax ---------------------------------------------------------------------------------------------------------


def of_copy(case: dict, name: str) -> str:
    return ratio(seconds(case, "copy") * (1.5 if "backward" in name else 1), seconds(case, name))


def megabytes(case: dict) -> int:
    """The size that was asked for: rows are whole."""
    return round(case["bytes"] / (64 << 20)) * 64


def softmax_page(data: dict) -> str:
    cases = {(case["dtype"], case["columns"], megabytes(case)): case for case in data["cases"]}
    passes = ("", " log", " backward")
    text = ""
    for size in sorted({size for *_, size in cases}, reverse=True):
        kinds = [(dtype, p) for dtype in SHORT for p in passes if any((d, s) == (dtype, size) for d, _, s in cases)]
        rows = []
        for columns in sorted({columns for _, columns, s in cases if s == size}):
            here = [(cases.get((dtype, columns, size)), p) for dtype, p in kinds]
            rows.append([columns, *(f"{of_copy(case, 'ours' + p)} ({of_copy(case, 'torch' + p)})" if case else "" for case, p in here)])
        text += f"{size} MB, share of the speed of a copy, torch's in brackets:\n\n"
        text += table(["columns", *(SHORT[dtype] + p for dtype, p in kinds)], rows)
    here = [case for (_, columns, size), case in cases.items() if (columns, size) == (4096, 256)]
    rows = [[f"`softmax.{name}`", *(of_copy(case, name) for case in here)]
            for name in ("naive", "online", "vector", "resident", "ring", "split") if any(name in case["seconds"] for case in here)]
    return text + table(["4096 columns, 256 MB", *(SHORT[case["dtype"]] for case in here)], rows)


# ---- plots -----------------------------------------------------------------------------------------------------------


def finish(figure, path: pathlib.Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    print(f"wrote {path.relative_to(ROOT)}")


def plot_gemm(pyplot, data: dict, path: pathlib.Path) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    case = next(case for case in data["cases"] if len(rungs(case)) > LADDER and case["dtype"] == "bfloat16")
    names = rungs(case)
    left.barh([name.replace("torch", "cuBLAS") for name in names], [tflops(case, name) for name in names], color="#1f6f8b",
              label=f"{case['m']}, bf16")
    left.invert_yaxis()
    left.set_xlabel("TFLOPS")
    for dtype, style in (("bfloat16", "-"), ("float16", "--")):
        squares = sorted((case for case in data["cases"] if is_square(case) and case["dtype"] == dtype), key=lambda case: case["m"])
        for name, colour in (("ours", "#1f6f8b"), ("torch", "#e08e45")):
            right.plot([case["m"] for case in squares], [tflops(case, name) for case in squares], style, marker="o", ms=3, color=colour,
                       label=f"{'flash_dmattn' if name == 'ours' else 'cuBLAS'} {SHORT[dtype]}")
    right.set_ylim(bottom=0)
    right.set_xlabel("rows, columns and depth")
    right.set_ylabel("TFLOPS")
    figure.suptitle(f"gemm, {data['device']}", fontsize=10)
    finish(figure, path)


def plot_softmax(pyplot, data: dict, path: pathlib.Path) -> None:
    size = 256
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axes, backward in zip(panels, ("", " backward")):
        for dtype, style in (("bfloat16", "-"), ("float32", "--")):
            here = sorted((c for c in data["cases"] if (c["dtype"], megabytes(c)) == (dtype, size) and math.log2(c["columns"]).is_integer()),
                          key=lambda case: case["columns"])
            for name, colour in (("ours", "#1f6f8b"), ("torch", "#e08e45")):
                axes.plot([case["columns"] for case in here], [float(of_copy(case, name + backward) or "nan") for case in here], style,
                          marker="o", ms=3, color=colour, label=f"{'flash_dmattn' if name == 'ours' else 'torch'} {SHORT[dtype]}")
        axes.axhline(1, color="#404040", lw=1, ls=":")
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.1)
        axes.set_xlabel("columns")
        axes.set_title(f"softmax{backward}", fontsize=9)
    panels[0].set_ylabel("share of the speed of a copy")
    figure.suptitle(f"softmax along rows, {size} MB, {data['device']}", fontsize=10)
    finish(figure, path)


def main(arguments: list) -> int:
    wrong = 0
    for name, page_of, plot in (("gemm", gemm_page, plot_gemm), ("softmax", softmax_page, plot_softmax)):
        data, path = result(name)
        old = PAGE.read_text()
        new, count = marked_table.replaced(old, f"{name} measured", origin(data, path) + page_of(data))
        if count != 1 or ("--check" in arguments and new != old):
            print(f"{PAGE.relative_to(ROOT)}: its table is not that of {path.relative_to(ROOT)}; run scripts/companions_table.py", file=sys.stderr)
            wrong = 1
        elif new != old:
            PAGE.write_text(new)
        if "--plot" in arguments:
            import matplotlib

            matplotlib.use("Agg")
            from matplotlib import pyplot

            plot(pyplot, data, ROOT / f"docs/images/{name}.png")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
