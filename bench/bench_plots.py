"""Plots of a benchmark report: one bar pair per cell, and one line per contender for each sweep."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Callable, Dict, List

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

COLOURS = {"flash-dmattn": "#1f6f8b", "sdpa-flash": "#e08e45", "sdpa-efficient": "#9aa656", "sdpa-math": "#b0b0b0",
           "memory-read": "#7d5ba6"}


def _contenders(records: List[Dict[str, Any]]) -> List[str]:
    return [name for name in COLOURS if any(name in record["results"] for record in records)]


def _finish(figure: Any, axes: Any, title: str, path: Path) -> None:
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def bars(records: List[Dict[str, Any]], title: str, path: Path) -> None:
    """Useful TFLOP/s of every contender, one group per cell; whiskers are the quartiles."""
    names = _contenders(records)
    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.16 * len(records) * (len(names) + 1)))
    height = 0.8 / max(1, len(names))
    for offset, name in enumerate(names):
        rows = [(index, record["results"][name]) for index, record in enumerate(records) if name in record["results"]]
        rate = [row["useful_tflops"] for _, row in rows]
        slow = [value * (1 - row["median_ms"] / row["quartile_high_ms"]) for value, (_, row) in zip(rate, rows)]
        fast = [value * (row["median_ms"] / row["quartile_low_ms"] - 1) for value, (_, row) in zip(rate, rows)]
        places = [index + offset * height for index, _ in rows]
        axes.barh(places, rate, height, xerr=[slow, fast], color=COLOURS[name], label=name, error_kw={"lw": 0.8})
    axes.set_yticks(
        [index + 0.4 - height / 2 for index in range(len(records))], [record["title"] for record in records]
    )
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s, visible pairs only")
    _finish(figure, axes, title, path)


def lines(
    records: List[Dict[str, Any]], x: Callable[[Dict[str, Any]], float], label: str, title: str, path: Path
) -> None:
    """Milliseconds of every contender over x, both axes logarithmic; bands are the quartiles."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name in _contenders(records):
        chosen = [record for record in records if name in record["results"]]
        rows = sorted(((x(record["cell"]), record["results"][name]) for record in chosen), key=lambda row: row[0])
        places = [place for place, _ in rows]
        axes.plot(places, [row["median_ms"] for _, row in rows], "o-", color=COLOURS[name], label=name)
        low, high = ([row[key] for _, row in rows] for key in ("quartile_low_ms", "quartile_high_ms"))
        axes.fill_between(places, low, high, color=COLOURS[name], alpha=0.2, lw=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("milliseconds")
    _finish(figure, axes, title, path)


SWEEPS = {
    "threads": (lambda cell: cell["threads"], "threads"),
    "S": (lambda cell: cell["Sk"], "sequence length"),
    "visible": (lambda cell: cell["topk"] / cell["Sk"], "keys kept per row / sequence length"),
}
# What a sweep changes, in the titles of its cells.
SWEPT = {"threads": r" \d+ threads", "S": r" S\d+(x\d+)?", "visible": r" top-\d+"}


def sweep_title(kind: str, direction: str, record: Dict[str, Any], device: Dict[str, Any]) -> str:
    """What is swept, what all cells have in common, and where."""
    threads = "" if kind == "threads" else f", {device['torch_threads']} threads"
    common = re.sub(SWEPT[kind], "", record["title"])
    return f"{direction} by {SWEEPS[kind][1]}: {common}\n{device['cpu']}{threads}"


def write(folder: Path, report: Dict[str, Any]) -> None:
    """One file per kind of record and pass: bench_<kind>_<pass>.png."""
    folder.mkdir(parents=True, exist_ok=True)
    device = report["device"]
    for kind in dict.fromkeys(record["kind"] for record in report["records"]):
        for direction in ("forward", "backward"):
            records = [r for r in report["records"] if r["kind"] == kind and r["pass"] == direction]
            if not records:
                continue
            path = folder / f"bench_{kind}_{direction}.png"
            title = f"{direction}, {device['cpu']}, {device['torch_threads']} threads"
            if kind in SWEEPS:
                lines(records, *SWEEPS[kind], sweep_title(kind, direction, records[-1], device), path)
            else:
                bars(records, title, path)
            print(f"wrote {path}")


# ---- reports of the CUDA benchmark -----------------------------------------------------------------------------------

CUDA_COLOURS = {
    "flash_dmattn": "#1f6f8b",
    "torch flash": "#e08e45",
    "torch cudnn": "#b5473c",
    "torch efficient": "#9aa656",
    "torch math": "#b0b0b0",
    "flex": "#7a5c99",
    "cudnn flex": "#8c564b",
    "flash-attn 2": "#c9a227",
    "flash-attn 3": "#3d8f5f",
    "flash-attn 4": "#2b4c7e",
}


def _panel(axes: Any, rows: List[Dict[str, Any]]) -> None:
    """TFLOPS over the sequence length, one line per contender; bands are the quartiles."""
    for name, colour in CUDA_COLOURS.items():
        chosen = sorted((row for row in rows if row["contender"] == name), key=lambda row: row["Sk"])
        if chosen:
            places = [row["Sk"] for row in chosen]
            axes.plot(places, [row["tflops"] for row in chosen], "o-", ms=3, lw=1.4, color=colour, label=name)
            edges = [
                [row["tflops"] * row["median_ms"] / row[key] for row in chosen]
                for key in ("quartile_high_ms", "quartile_low_ms")
            ]
            axes.fill_between(places, *edges, color=colour, alpha=0.2, lw=0)
    axes.set_xscale("log", base=2)
    axes.spines[["top", "right"]].set_visible(False)


def _finish_panels(figure: Any, panels: Any, title: str, path: Path) -> None:
    """Writes the panels with one legend of what any of them names."""
    found = [axes.get_legend_handles_labels() for axes in panels.flat]
    legend = {label: handle for pair in found for handle, label in zip(*pair)}
    figure.legend(legend.values(), legend.keys(), frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _grid(rows: List[Dict[str, Any]], title: str, path: Path) -> None:
    """One panel per head dim and causal or not."""
    dims = sorted({row["D"] for row in rows})
    kinds = sorted({row["causal"] for row in rows})
    figure, panels = pyplot.subplots(
        len(kinds), len(dims), figsize=(3.4 * len(dims) + 1, 2.7 * len(kinds) + 0.6), squeeze=False, sharey="row"
    )
    for line, causal in zip(panels, kinds):
        for axes, head_dim in zip(line, dims):
            _panel(axes, [row for row in rows if (row["D"], row["causal"]) == (head_dim, causal)])
            axes.set_title(f"D {head_dim}{', causal' if causal else ''}", fontsize=9)
        line[0].set_ylabel("TFLOPS")
        line[0].set_ylim(bottom=0)  # of all panels of the line
    for axes in panels[-1]:
        axes.set_xlabel("sequence length")
    _finish_panels(figure, panels, title, path)


def _case_bars(rows: List[Dict[str, Any]], column: str, label: str, title: str, path: Path, limit: float = 0.0) -> None:
    """Bars of one column, a group per case; whiskers are the quartiles, a line at `limit`."""
    rows = [row for row in rows if row[column]]
    cases = list(dict.fromkeys(_case_name(row) for row in rows))
    names = [name for name in CUDA_COLOURS if any(row["contender"] == name for row in rows)]
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.18 * len(cases) * (len(names) + 1)))
    height = 0.8 / max(1, len(names))
    for offset, name in enumerate(names):
        chosen = [row for row in rows if row["contender"] == name]
        places = [cases.index(_case_name(row)) + offset * height for row in chosen]
        values = [row[column] for row in chosen]
        slow = [value * (1 - row["median_ms"] / row["quartile_high_ms"]) for value, row in zip(values, chosen)]
        fast = [value * (row["median_ms"] / row["quartile_low_ms"] - 1) for value, row in zip(values, chosen)]
        whiskers = {"xerr": [slow, fast], "error_kw": {"lw": 0.8}}
        axes.barh(places, values, height, color=CUDA_COLOURS[name], label=name, **whiskers)
    if limit:
        axes.axvline(limit, color="#404040", lw=1, ls="--", label="copy")
    axes.set_yticks([index + 0.4 - height / 2 for index in range(len(cases))], cases)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    _finish(figure, axes, title, path)


def _case_name(row: Dict[str, Any]) -> str:
    heads = f"H{row['H']}" + (f"/{row['Hkv']}" if row["H"] != row["Hkv"] else "")
    length = f"S{row['Sk']}" if row["Sq"] == row["Sk"] else f"{row['Sq']}x{row['Sk']}"
    words = [f"B{row['B']} {heads} {length} D{row['D']}", "causal" if row["causal"] else "", row["extra"]]
    return " ".join(word for word in [*words, "backward" if row["pass"] == "backward" else ""] if word)


def _mask_grid(rows: List[Dict[str, Any]], title: str, path: Path) -> None:
    """Times of the mask grid's peers over ours: a panel for each pass, a line for each mask, a dot for each head dim,
    heads and length."""
    from bench_report import OURS, PLAN

    rows = [row for row in rows if not row["contender"].startswith(OURS) and not row["contender"].endswith(PLAN)]
    masks = [("causal " if row["causal"] else "") + row["extra"] for row in rows]
    kinds = list(dict.fromkeys(masks))
    longest = max(row["Sk"] for row in rows)
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.2), sharex=True, sharey=True)
    for axes, direction in zip(panels, ("forward", "backward")):
        for row, mask in zip(rows, masks):
            if row["pass"] == direction:
                colour = CUDA_COLOURS[row["contender"]]
                filled = {"markerfacecolor": colour if row["Sk"] == longest else "none"}
                label = f"{row['contender']}, S{row['Sk']}"
                axes.plot(row["time_over_ours"], kinds.index(mask), "o", color=colour, ms=5, label=label, **filled)
        axes.axvline(1.0, color=CUDA_COLOURS[OURS], lw=1.2)
        axes.set_title(direction, fontsize=9)
        axes.set_xlabel("time over flash_dmattn's")
        axes.set_yticks(range(len(kinds)), kinds)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    _finish_panels(figure, panels, title, path)


def write_cuda(folder: Path, report: Dict[str, Any]) -> None:
    """cuda_forward.png, cuda_backward.png (TFLOPS by sequence length), cuda_masks.png (TFLOPS of visible pairs),
    mask_grid.png (times of peers over ours) and cuda_decode.png (TB/s beside a copy), as far as the report has such
    cases."""
    from bench_report import rows

    folder.mkdir(parents=True, exist_ok=True)
    table = rows(report)
    where = f"{report['facts']['device']}, torch {report['facts']['torch']}"
    masked = ("scores", "intervals", "backward-scores", "backward-intervals")
    copy = report["ceilings"]["copy_bytes_per_second"] * 1e-12
    for name, chosen in (
        ("forward", [row for row in table if row["set"] == "forward"]),
        ("backward", [row for row in table if row["set"] == "backward"]),
        ("masks", [row for row in table if row["set"] in masked]),
        ("decode", [row for row in table if row["tb_per_s"]]),
        ("mask_grid", [row for row in table if row["set"].endswith("mask-grid")]),
    ):
        path = folder / (f"{name}.png" if name == "mask_grid" else f"cuda_{name}.png")
        if not chosen:
            continue
        if name == "masks":
            _case_bars(chosen, "useful_tflops", "TFLOPS, visible pairs only", f"masks and biases, {where}", path)
        elif name == "mask_grid":
            _mask_grid(chosen, f"masks of contiguous runs, {where}", path)
        elif name == "decode":
            _case_bars(chosen, "tb_per_s", "TB/s of K and V", f"one query row, {where}", path, copy)
        else:
            _grid(chosen, f"{name}, {where}", path)
        print(f"wrote {path}")
