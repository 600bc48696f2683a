#!/usr/bin/env python3
"""tune_fit.py: fits the model of src/tuning to records of bench/tune_record.py, and says how well it chooses.

Each way to run a problem has constants of its own, by non-negative least squares on predicted / measured: eight numbers
that multiply the features of src/tuning/model.h, drawn towards those of its tile in any order and on any problem.
Problems with n % 5 == 0 are never fitted to. Writes src/tuning/model_table.c; --held-back measures the model on the
problems that are held back, writes the table of docs/lab/tuning_gain.md, and with --plot its picture.

    scripts/tune_fit.py --fdm build/fdm bench/results/nvidia-h200/2026-11-28-tune.json [--held-back] [--check]
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import pathlib
import re
import subprocess
import sys

import numpy
from scipy.optimize import nnls

import kernel_renames
import marked_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "src/tuning/model_table.c"
PAGE = ROOT / "docs/lab/tuning_gain.md"
FEATURES = 8
NEAR = 1.4  # a way that never comes so near to the fastest gets no row of its own
LEAST = 3  # problems for a row of its own
TOWARDS_KIND, TOWARDS_TILE = 0.3, 0.1  # weights of the constants that a row is drawn towards
LEAD, SURE = 0.02, 2.0  # the rules' choice stays unless another is predicted to take LEAD less time, and SURE times
# what both rows err together less (src/plan/predict.c)
ORDERS = re.compile(r"_(Parts|Static|Longest|Dynamic|Exp).*")


def features_of(fdm: str, arch: str, problem: dict) -> dict:
    command = [fdm, "plan", "--device", arch, "--predict", "--json", *problem["problem"].split()]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {(row["kernel"], row["choice"]): row for row in found}


def load(fdm: str, path: pathlib.Path) -> tuple[str, list[dict]]:
    """The problems of a record with the features of each way that was timed."""
    record = json.loads(path.read_text())
    timed = [p for p in record["problems"] if p.get("rows")]
    arch = timed[0]["device"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        known = list(pool.map(lambda p: features_of(fdm, arch, p), timed))
    problems = []
    for problem, features in zip(timed, known, strict=True):
        ways = []
        for row in problem["rows"]:
            way = features.get((kernel_renames.current(row["kernel"]), row["choice"]))
            if way and row.get("samples"):
                ways.append({"name": way["name"], "features": numpy.array(way["features"]), "seconds": row["seconds"],
                             "choice": row["choice"], "rule": way["rule"]})  # fmt: skip
        problems.append({"number": problem["number"], "kind": problem["kind"], "text": problem["problem"],
                         "ways": ways})  # fmt: skip
    return arch, problems


def tile_of(name: str) -> str:
    kernel, choice, dim, _ = name.split(" ")
    return f"{kernel} {ORDERS.sub('', choice)} {dim} *"


def kind_of(name: str) -> str:
    kernel, choice, dim, kind = name.split(" ")
    return f"{kernel} {ORDERS.sub('', choice)} {dim} ={kind}"


def solve(ways: list[dict], towards: numpy.ndarray, weight: float) -> numpy.ndarray:
    matrix = numpy.array([way["features"] / way["seconds"] for way in ways])
    scale = numpy.sqrt((matrix**2).mean(axis=0))
    scale[scale == 0] = 1e-9
    root, counts, found = numpy.sqrt(weight), numpy.ones(len(ways)), towards
    for _ in range(4):  # too much and too little by one factor count alike
        left = numpy.vstack([matrix * counts[:, None] / scale, root * numpy.eye(FEATURES)])
        found = nnls(left, numpy.concatenate([counts, root * towards * scale]))[0] / scale
        counts = 1 / numpy.sqrt(numpy.clip(matrix @ found, 0.5, 2))
    return found


def fit(problems: list[dict]) -> dict[str, tuple[numpy.ndarray, float, int]]:
    """Constants, residual and number of problems by the name of a row."""
    by_name, by_kind, by_tile = (collections.defaultdict(list) for _ in range(3))
    near = set()
    for problem in problems:
        best = min(way["seconds"] for way in problem["ways"])
        for way in problem["ways"]:
            by_name[way["name"]].append(way)
            by_kind[kind_of(way["name"])].append(way)
            by_tile[tile_of(way["name"])].append(way)
            if way["seconds"] <= NEAR * best:
                near.add(way["name"])
    tiles = {name: solve(ways, numpy.zeros(FEATURES), 1e-3) for name, ways in by_tile.items()}
    kinds = {name: solve(ways, tiles[tile_of(name)], TOWARDS_TILE) for name, ways in by_kind.items()}
    rows = {name: (tiles[name], by_tile[name]) for name in tiles if len(by_tile[name]) >= LEAST}
    for name, ways in by_name.items():
        if name in near and len(ways) >= LEAST:
            rows[name] = (solve(ways, kinds[kind_of(name)], TOWARDS_KIND), ways)
    return {name: (found, residual(found, ways), len(ways)) for name, (found, ways) in rows.items()}


def residual(found: numpy.ndarray, ways: list[dict]) -> float:
    errors = [way["features"] @ found / way["seconds"] - 1 for way in ways]
    return float(numpy.sqrt(numpy.mean(numpy.square(errors))))


def row_of(rows: dict, way: dict) -> tuple | None:
    return rows.get(way["name"]) or rows.get(tile_of(way["name"]))


def predict(rows: dict, way: dict) -> float | None:
    row = row_of(rows, way)
    return float(row[0] @ way["features"]) if row else None


def choose(rows: dict, ways: list[dict], rule: dict) -> dict:
    """The rules' choice, or the way of the least predicted time among those that lead it surely."""
    chosen, least, of_rule = rule, numpy.inf, row_of(rows, rule)
    for way in ways if of_rule else ():
        row = row_of(rows, way)
        seconds = predict(rows, way) if row else numpy.inf
        lead = max(LEAD, SURE * float(numpy.hypot(of_rule[1], row[1]))) if row else 0
        if seconds < least and seconds < (1 - lead) * predict(rows, rule):
            chosen, least = way, seconds
    return chosen


def judge(rows: dict, problems: list[dict]) -> list[dict]:
    """What the model's first choice and the rules' lose to the fastest way."""
    judged = []
    for problem in problems:
        best = min(way["seconds"] for way in problem["ways"])
        rule = next(way for way in problem["ways"] if way["rule"])
        known = [(seconds, way) for way in problem["ways"] if (seconds := predict(rows, way)) is not None]
        chosen = choose(rows, problem["ways"], rule)
        ranked = sorted(known, key=lambda pair: pair[0])[:12]
        judged.append({
            "problem": problem, "chosen": chosen, "model": chosen["seconds"] / best - 1,
            "rule": rule["seconds"] / best - 1,
            "twelve": min([way["seconds"] for _, way in ranked] + [rule["seconds"]]) / best - 1,
            "errors": [abs(seconds / way["seconds"] - 1) for seconds, way in known],
        })  # fmt: skip
    return judged


def summary(judged: list[dict], key: str) -> str:
    losses = numpy.array([row[key] for row in judged])
    return f"{100 * losses.mean():.1f} | {100 * numpy.median(losses):.1f} | {100 * losses.max():.0f}"


def make_page(judged: list[dict]) -> list[str]:
    groups = collections.defaultdict(list)
    for row in judged:
        which, _, kind = row["problem"]["kind"].split("/")
        groups["decode" if kind == "decode" else which].append(row)
    groups = {**dict(sorted(groups.items())), "all": judged}
    lines = ["| problems | number | model: mean | median | worst | rules: mean | median | worst | best of the model's "
             "twelve: mean | median | worst | error of predicted times, mean |", "|---" * 12 + "|"]  # fmt: skip
    for name, rows in groups.items():
        error = numpy.mean([error for row in rows for error in row["errors"]])
        lines.append(f"| {name} | {len(rows)} | {summary(rows, 'model')} | {summary(rows, 'rule')} | "
                     f"{summary(rows, 'twelve')} | {100 * error:.0f} |")  # fmt: skip
    return lines


def make_plot(judged: list[dict], path: pathlib.Path) -> None:
    """Losses in rising order, as an SVG without a library."""
    width, height, most = 640, 320, 0.5
    lines = []
    for key, colour in (("rule", "#c44"), ("model", "#24a"), ("twelve", "#2a4")):
        losses = sorted(min(row[key], most) for row in judged)
        points = " ".join(f"{50 + (width - 70) * i / max(len(losses) - 1, 1):.1f},"
                          f"{height - 40 - (height - 60) * loss / most:.1f}" for i, loss in enumerate(losses))  # fmt: skip
        words = {"rule": "rules", "model": "model's first choice", "twelve": "best of the model's twelve"}[key]
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>')
        lines.append(f'<text x="70" y="{30 + 18 * len(lines) // 2}" fill="{colour}">{words}</text>')
    axis = "".join(f'<text x="8" y="{height - 36 - (height - 60) * p / 50:.0f}">{p} %</text>' for p in (0, 10, 25, 50))
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
                    f'font-size="13"><rect width="100%" height="100%" fill="white"/>{axis}{"".join(lines)}'
                    f'<text x="{width - 330}" y="{height - 10}">held-back problems, by their loss to the fastest way'
                    f"</text></svg>\n")  # fmt: skip


def make_table(arch: str, rows: dict, sources: list[str]) -> str:
    major, minor = int(arch[3:]) // 10, int(arch[3:]) % 10
    text = [
        "/* model_table.c: made by scripts/tune_fit.py from " + ", ".join(sources) + ". */",
        '#include "tuning/model.h"', "", "/* clang-format off */", "static const struct model_row rows[] = {",
    ]  # fmt: skip
    for name in sorted(rows, key=str.encode):
        constants, error, count = rows[name]
        numbers = ",".join(f"{value:.3g}" for value in constants)
        line = f'{{"{name}",{{{numbers}}},{error:.2g},{count}}},'.replace("e-0", "e-").replace("e+0", "e")
        text.append(line if len(line) <= 120 else line.replace('",{', '",\n{', 1))
    text += ["};", "/* clang-format on */", "",
             f"const struct model_table model_tables[] = {{{{{major}, {minor}, rows, sizeof rows / sizeof rows[0]}}}};",
             "const int32_t num_model_tables = 1;"]  # fmt: skip
    return "\n".join(text) + "\n"


def cross(problems: list[dict]) -> list[dict]:
    """Each problem judged by constants that were fitted to those of other remainders of n by five."""
    judged = []
    for fold in {problem["number"] % 5 for problem in problems}:
        rows = fit([problem for problem in problems if problem["number"] % 5 != fold])
        judged += judge(rows, [problem for problem in problems if problem["number"] % 5 == fold])
    return judged


def write_table(name: str, judged: list[dict]) -> None:
    page = PAGE.read_text()
    PAGE.write_text(marked_table.replaced(page, name, "\n".join(make_page(judged)) + "\n")[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=pathlib.Path)
    parser.add_argument("--fdm", default=str(ROOT / "build/fdm"))
    parser.add_argument("--held-back", action="store_true", help="measure it on what was held back; into docs/lab/tuning_gain.md")
    parser.add_argument("--plot", type=pathlib.Path)
    parser.add_argument("--check", action="store_true", help="four-fold on what is fitted to; writes nothing")
    parser.add_argument("--crossed", action="store_true", help="five-fold on the whole record; into docs/lab/tuning_gain.md")
    options = parser.parse_args()
    arch, problems = load(options.fdm, options.record)
    fitted = [problem for problem in problems if problem["number"] % 5]
    held_back = [problem for problem in problems if problem["number"] % 5 == 0]
    if options.check:
        print("\n".join(make_page(cross(fitted))))
        return 0
    rows = fit(fitted)
    TABLE.write_text(make_table(arch, rows, [options.record.resolve().relative_to(ROOT).as_posix()]))
    print(f"{TABLE.relative_to(ROOT)}: {len(rows)} rows from {len(fitted)} problems")
    if options.held_back:
        judged = judge(rows, held_back)
        write_table("held back", judged)
        if options.plot:
            make_plot(judged, options.plot)
    if options.crossed:
        write_table("crossed", cross(problems))
    return 0


if __name__ == "__main__":
    sys.exit(main())
