#!/usr/bin/env python3
"""record.py: writes what check programs found into bench/results/, from which scripts/verified.py makes docs/verified.md.

Usage: record.py compile LIST FILE...     lines of fdm-checks compile --json, beside what --list says; for scripts/compile_all.sh
       record.py known                    what is recorded of them, in the form of that list
       record.py checks RESULTS FOLDER    a run of scripts/check_device.sh in FOLDER, or of fdm-checks --json, for the file RESULTS

The record of compilations is a list of groups, one for each architecture and kernel entry, with the key of fdm-checks compile --list.
A file of checks is {"device", "kind": "hardware", "cpu" or "emulated", "runs"}. A run is one subject (a kernel, or what else was checked) under one check:
{"subject", "architecture", "check", "date", "commit", "right", "wrong", "findings", "command", "note"}; "findings" are the errors and
hazards that a sanitizer reports; the last two may be missing. A newer run of a subject, architecture and check replaces the older.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import re
import subprocess
import sys

import kernel_renames

ROOT = pathlib.Path(__file__).resolve().parent.parent
MATRIX = ROOT / "bench/results/compile/matrix.json"
COUNTS = ("compiled", "failed", "spilled")
PEAKS = ("spill_bytes_max", "registers_max")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


def said_by(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def lines_of(path: pathlib.Path) -> list:
    return [json.loads(line) for line in path.read_text().splitlines()]


def stamp(commit: str) -> dict:
    return {"date": datetime.date.today().isoformat(), "commit": commit}


def write(path: pathlib.Path, data: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
    print(f"recorded in {path.resolve().relative_to(ROOT)}")


# ---- compilations ----------------------------------------------------------------------------------------------------


def groups() -> list:
    return json.loads(MATRIX.read_text())["groups"] if MATRIX.is_file() else []


def place(group: dict) -> tuple:
    return group["architecture"], kernel_renames.current(group["entry"])


def record_compile(listed: str, files: list) -> int:
    """Adds shares up, and replaces what is recorded of the same groups; groups that LIST does not name are gone. 1 when something failed: a
    group that failed, or of which some are missing, is not recorded."""
    new: dict = {}
    for line in (line for file in files for line in lines_of(pathlib.Path(file))):
        group = new.setdefault(place(line), line | dict.fromkeys(COUNTS + PEAKS, 0))
        for name in COUNTS:
            group[name] += line[name]
        for name in PEAKS:
            group[name] = max(group[name], line[name])
    compiler = re.search(r"libnvrtc\S*", said_by("build/fdm", "info"))
    origin = stamp(said_by("git", "rev-parse", "--short=7", "HEAD")) | {"compiler": compiler[0] if compiler else ""}
    whole = {where: {name: value for name, value in group.items() if name not in ("listed", "failed")} | origin
             for where, group in new.items() if group["compiled"] == group["listed"] and not group["failed"]}
    there = {tuple(line.split()[:2]) for line in pathlib.Path(listed).read_text().splitlines()}
    kept = {place(group): group for group in groups()} | whole
    write(MATRIX, {"groups": [kept[where] for where in sorted(kept) if where in there]})
    return int(any(group["failed"] for group in new.values()))


def known() -> str:
    return "".join(f"{' '.join(place(group))} {group['compiled']} {group['key']}\n" for group in groups())


# ---- checks ----------------------------------------------------------------------------------------------------------


def of_checks(path: pathlib.Path, check: str) -> list:
    """Runs of the lines that one process of fdm-checks wrote; kernels that took no problem are left out."""
    return [{"subject": line["kernel"], "architecture": line["device"], "check": check, "right": line["right"], "wrong": line["wrong"]}
            for line in lines_of(path) if line["right"] + line["wrong"]]


def findings(log: pathlib.Path) -> int | None:
    """Errors and hazards that compute-sanitizer counted; None when it did not come to its summary."""
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors|hazards)", log.read_text(errors="replace"))
    return int(found[-1]) if found else None


def of_program(log: pathlib.Path, subject: str, check: str, architecture: str, right: str) -> list:
    """A program that prints a line for each problem, which begins with `right` or with WRONG, perhaps as a table's row."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    counts = {word: len(re.findall(rf"^(?:\| )?{word}\b", text, flags=re.MULTILINE)) for word in (right, "WRONG")}
    run = {"subject": subject, "architecture": architecture, "check": check, "right": counts[right], "wrong": counts["WRONG"]}
    return [run] if sum(counts.values()) else []


def of_folder(folder: pathlib.Path) -> list:
    """Everything that scripts/check_device.sh left: NAME.jsonl of problems, NAME-TOOL.jsonl and .log of a tool's run."""
    runs: list = []
    for path in sorted(folder.glob("*.jsonl")):
        tool = next((tool for tool in SANITIZERS if path.stem.endswith("-" + tool)), None)
        new = of_checks(path, tool or "problems")
        if tool:
            found = findings(path.with_suffix(".log"))
            new = [run | {"findings": found} for run in new if found is not None]
        runs += new
    architecture = runs[0]["architecture"] if runs else ""
    for subject, right in (("hopper-probe", "exact"), ("merge-check", "right"), ("topk-check", "right"), ("interval-check", "right"), ("dense-check", "right"), ("slots-check", "right"), ("key-bias-check", "right"),
                           ("instruction-check", "agrees")):
        runs += of_program(folder / f"{subject}.log", subject, "problems", architecture, right)
        for tool in SANITIZERS:
            found = findings(folder / f"{subject}-{tool}.log") if (folder / f"{subject}-{tool}.log").is_file() else None
            if found is not None:
                runs += [run | {"findings": found} for run in
                         of_program(folder / f"{subject}-{tool}.log", subject, tool, architecture, right)]
    return runs + of_companions(folder, architecture)


def of_kernels(log: pathlib.Path, check: str, architecture: str) -> list:
    """A program that prints a line for each kernel: NAME: R right, W wrong, ...; "chosen" is the kernel that the plan takes."""
    lines = re.findall(r"^(\S+): (\d+) right, (\d+) wrong", log.read_text(errors="replace"), flags=re.MULTILINE)
    operation = log.name.split("-")[0]
    runs = [{"subject": f"{operation}, the kernel that is chosen" if name == "chosen" else name, "architecture": architecture, "check": check,
             "right": int(right), "wrong": int(wrong)} for name, right, wrong in lines]
    return [run for run in runs if run["right"] + run["wrong"]]


def of_companions(folder: pathlib.Path, architecture: str) -> list:
    runs: list = []
    for log in sorted([*folder.glob("softmax-check*.log"), *folder.glob("gemm-check*.log")]):
        tool = next((tool for tool in SANITIZERS if log.stem.endswith("-" + tool)), None)
        found = findings(log) if tool else None
        if not tool or found is not None:
            runs += [run | ({"findings": found} if tool else {}) for run in of_kernels(log, tool or "problems", architecture)]
    return runs


def key(run: dict) -> tuple:
    return run["subject"], run["architecture"], run["check"]


def record_checks(results: pathlib.Path, folder: pathlib.Path) -> int:
    """Merges the processes of one run, then replaces what is recorded of the same subjects and checks."""
    merged: dict = {}
    for run in of_folder(folder):
        known = merged.setdefault(key(run), run | {"right": 0, "wrong": 0} | ({"findings": 0} if "findings" in run else {}))
        for name in {"right", "wrong", "findings"} & run.keys():
            known[name] += run[name]
    if not merged:
        print(f"{folder} holds no results", file=sys.stderr)
        return 1
    data = json.loads(results.read_text()) if results.is_file() else {"device": results.parent.name, "kind": "hardware", "runs": []}
    data["runs"] = [run for run in data["runs"] if key(run) not in merged] + [
        run | stamp(said_by("git", "rev-parse", "--short=7", "HEAD")) for run in merged.values()]
    write(results, data)
    return int(any(run["wrong"] for run in merged.values()))


def main(arguments: list) -> int:
    match arguments:
        case ["known"]:
            print(known(), end="")
            return 0
        case ["compile", listed, *files] if files:
            return record_compile(listed, files)
        case ["checks", results, folder]:
            return record_checks(pathlib.Path(results), pathlib.Path(folder))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
