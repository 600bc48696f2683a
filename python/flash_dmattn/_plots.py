"""Plots of a benchmark report: one bar pair per cell, and one line per contender for each sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

COLOURS = {"flash-dmattn": "#1f6f8b", "sdpa-flash": "#e08e45", "sdpa-efficient": "#9aa656", "sdpa-math": "#b0b0b0"}


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
                lines(records, *SWEEPS[kind], f"{title}\n{records[-1]['title']}", path)
            else:
                bars(records, title, path)
            print(f"wrote {path}")
