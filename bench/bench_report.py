"""Reports of the CUDA benchmark, from what was measured or from a recorded JSON file: rows, a table of comma-separated
values, and text. Needs no device and no PyTorch."""

from __future__ import annotations

import argparse
import csv
import math
import os
import pathlib
import re
import statistics
from typing import Any, Dict, List, Optional

OURS = "flash_dmattn"
COPY = "copy"  # of as many bytes as the case has to move
ROWS, KEPT = ", by rows", ", plan kept"  # follow OURS where the mask grid says a mask otherwise, or keeps its plan
PLAN = ", its plan"  # ends the name of what a peer makes of a mask before its calls; no attention
COLUMNS = (
    "set", "pass", "B", "H", "Hkv", "Sq", "Sk", "D", "dtype", "causal", "extra", "contender", "median_ms",
    "quartile_low_ms", "quartile_high_ms", "tflops", "useful_tflops", "tb_per_s", "share_of_copy", "time_over_ours",
    "over_ours_with_plans",
)  # fmt: skip

_TITLE = re.compile(
    r"B(?P<B>\d+) H(?P<H>\d+)(/(?P<Hkv>\d+))? (S(?P<S>\d+)|Sq(?P<Sq>\d+) Sk(?P<Sk>\d+)) D(?P<D>\d+) (?P<dtype>\w+)"
    r"(?P<causal> causal)?( (?P<extra>(?!backward).+?))?(?P<backward> backward)?$"
)


def cell_of(title: str) -> Dict[str, Any]:
    """The problem that a case's title says."""
    match = _TITLE.match(title)
    if match is None:
        raise ValueError(f"{title!r} is not the title of a case")
    part = match.groupdict()
    cell: Dict[str, Any] = {"pass": "backward" if part["backward"] else "forward"}
    cell |= {name: int(part[name] or part[other]) for name, other in
             (("B", "B"), ("H", "H"), ("Hkv", "H"), ("Sq", "S"), ("Sk", "S"), ("D", "D"))}
    return cell | {"dtype": part["dtype"], "causal": bool(part["causal"]), "extra": part["extra"] or ""}


def is_counted(extra: str) -> bool:
    """Whether a case's visible pairs do not follow from its title."""
    return extra in ("dense mask", "padded") or extra.endswith("documents") or extra.startswith(("window-", "prefix-"))


def visible_pairs(cell: Dict[str, Any]) -> Optional[float]:
    """Visible pairs of causal and top-W cells; None for a mask, which has to be counted."""
    if is_counted(cell["extra"]):
        return None
    kept = re.match(r"top-(\d+)", cell["extra"])
    most = int(kept.group(1)) if kept else cell["Sk"]
    if not cell["causal"]:
        return float(cell["B"] * cell["H"] * cell["Sq"] * most)
    first = cell["Sk"] - cell["Sq"] + 1  # keys that row 0 sees
    ends = range(first, first + cell["Sq"])
    return float(cell["B"] * cell["H"] * sum(min(max(end, 0), most) for end in ends))


def useful_flops(cell: Dict[str, Any], pairs: float) -> float:
    return 4.0 * cell["D"] * pairs * (2.5 if cell["pass"] == "backward" else 1.0)


def moved_bytes(cell: Dict[str, Any], pairs: Optional[float] = None) -> float:
    """K and V of the visible pairs (None: all), read once, and a mask of [B, Sk] or intervals of [Hkv, Sk]: what bounds a
    call with one query row."""
    item = 4 if cell["dtype"] == "float32" else 2
    keys = cell["B"] * cell["Hkv"] * cell["Sk"] if pairs is None else pairs / cell["H"] * cell["Hkv"]
    hiding = cell["B"] * cell["Sk"] if cell["extra"] == "padded" else 0
    hiding += 8 * cell["Hkv"] * cell["Sk"] if cell["extra"].startswith("top-") else 0
    return 2.0 * keys * cell["D"] * item + hiding


def quartiles(samples: List[float]) -> List[float]:
    return statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3


def rows(report: Dict[str, Any]) -> List[Dict[str, Any]]:
    """One dict of COLUMNS a contender and case; None where a column does not apply. A share of a copy is that of one with
    as many bytes, where the case has it; else of a copy of 2 GiB."""
    copy = report["ceilings"]["copy_bytes_per_second"]
    table = []
    for result in report["results"]:
        cell = cell_of(result["title"])
        pairs = visible_pairs(cell)
        useful = result.get("useful_flops") if pairs is None else useful_flops(cell, pairs)
        seen = pairs if pairs is not None else useful and useful / useful_flops(cell, 1.0)
        ours = statistics.median(result["seconds"][OURS])
        copied = statistics.median(result["seconds"].get(COPY, [0.0]))
        for name, samples in result["seconds"].items():
            low, median, high = quartiles(samples)
            speed = moved_bytes(cell, seen) / median if cell["Sq"] == 1 else None
            row = {"set": result["set"], **cell, "contender": name, "median_ms": median * 1e3}
            row |= {"quartile_low_ms": low * 1e3, "quartile_high_ms": high * 1e3}
            row |= {"tflops": result["flops"] / median * 1e-12, "useful_tflops": useful and useful / median * 1e-12}
            row |= {"tb_per_s": speed and speed * 1e-12, "share_of_copy": speed and (copied / median if copied else speed / copy)}
            is_grid = result["set"].endswith("mask-grid")
            row |= {"time_over_ours": _grid_ratio(result["seconds"], name) if is_grid else median / ours}
            has_plan = is_grid and name + PLAN in result["seconds"] and not name.startswith(OURS)
            table.append(row | {"over_ours_with_plans": _grid_ratio(result["seconds"], name, True) if has_plan else None})
    return table


def _grid_ratio(seconds: Dict[str, List[float]], name: str, plans: bool = False) -> float:
    """A contender's time over ours in the mask grid: a peer, whose plan is kept, beside ours with a plan that is kept, where
    that was measured. plans: the time of making plans counts on both sides. The least samples count: the host of cuDNN's
    flex_attention at times takes longer than the device waits for it."""
    is_peer = not name.startswith(OURS)
    beside = OURS + KEPT if is_peer and not plans and OURS + KEPT in seconds else OURS
    return (min(seconds[name]) + (min(seconds[name + PLAN]) if plans else 0.0)) / min(seconds[beside])


def check_writable(parser: argparse.ArgumentParser, *paths: Optional[pathlib.Path]) -> None:
    """Before the work: makes the files' folders; what cannot be written is an error of the options."""
    for path in filter(None, paths):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"{path} cannot be written: {error.strerror}")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            parser.error(f"{path} cannot be written: {'it is a folder' if path.is_dir() else 'permission denied'}")


def write_csv(path: pathlib.Path, report: Dict[str, Any]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows(report):
            shown = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()}
            writer.writerow(shown)


def show(table: List[Dict[str, Any]], title: str) -> None:
    """The rows of one case."""
    print(title)
    for row in table:
        if row["contender"].endswith(PLAN):
            print(f"    {row['contender']} {row['median_ms']:.4f} ms")
            continue
        if row["tb_per_s"]:
            speed = f"{row['tb_per_s']:6.2f} TB/s ({row['share_of_copy']:4.0%} of a copy)"
        else:
            speed = f"{row['tflops']:7.1f} TFLOPS"
            if row["useful_tflops"] and (row["extra"].startswith("top-") or is_counted(row["extra"])):
                speed += f" ({row['useful_tflops']:6.1f} of visible pairs)"
        spread = f"[{row['quartile_low_ms']:.4f}, {row['quartile_high_ms']:.4f}]"
        print(f"    {row['contender']:16s} {row['median_ms']:9.4f} ms {spread}  {speed}  {row['time_over_ours']:5.2f}x")


def summarise(table: List[Dict[str, Any]]) -> None:
    """Geometric mean and least of each peer's time over ours, by set; of the mask grid by mask, too."""
    for name in dict.fromkeys(row["set"] for row in table):
        for peer in dict.fromkeys(row["contender"] for row in table if row["contender"] != OURS):
            chosen = [row for row in table if (row["set"], row["contender"]) == (name, peer)]
            if not chosen or peer.endswith(PLAN):
                continue
            _tell_ratios(f"{name}: {peer}", chosen)
            if all(row["over_ours_with_plans"] for row in chosen):
                _tell_ratios("    with plans made on both sides it", chosen, "over_ours_with_plans")
            if name.endswith("mask-grid") and not peer.startswith(OURS):
                for kind in dict.fromkeys((row["extra"], row["causal"]) for row in chosen):
                    words = f"    {kind[0]}{', causal' if kind[1] else ''}"
                    _tell_ratios(words, [row for row in chosen if (row["extra"], row["causal"]) == kind])


def _tell_ratios(subject: str, rows: List[Dict[str, Any]], column: str = "time_over_ours") -> None:
    ratios = [row[column] for row in rows]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"{subject} takes {mean:.3f}x our time in the geometric mean of {len(ratios)} cases, at least {min(ratios):.3f}x")
