#!/usr/bin/env python3
"""verified.py: writes the tables of docs/verified.md from bench/results/*/checks.json and bench/results/compile/matrix.json.

Each table stands between its markers; the prose around them is written by hand. Usage: verified.py [--check]
"""

from __future__ import annotations

import json
import pathlib
import sys

import kernel_renames
import marked_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/verified.md"
COLUMNS = ("problems", "memcheck", "racecheck", "initcheck", "synccheck")  # of kernels; others have a table of their own
ARCHITECTURES = {"sm_80": "8.0", "sm_86": "8.6", "sm_89": "8.9", "sm_90": "9.0", "sm_100": "10.0", "sm_120": "12.0"}


def origin(run: dict) -> str:
    return f"{run['date']} | {run['commit'] or 'not recorded'}"


def result(run: dict) -> str:
    """What a run found, in a few words."""
    if "result" in run:
        return run["result"]
    right = "not counted" if run["right"] is None else f"{run['right']:,}"
    words = [right] + ([f"**{run['wrong']} wrong**"] if run["wrong"] else [])
    return ", ".join(words + ([f"{run['findings']} findings"] if run.get("findings") else []))


def rows(runs: list, name: str, columns: list, column_of) -> str:
    """A row for each run, by subject and in the order of `columns`."""
    text = f"| | {name} | right | date | commit |\n|---|---|---|---|---|\n"
    for run in sorted(runs, key=lambda run: (kernel_renames.current(run["subject"]), columns.index(column_of(run)))):
        text += f"| `{kernel_renames.current(run['subject'])}` | {column_of(run)} | {result(run)} | {origin(run)} |\n"
    return text


def listed(devices: list) -> str:
    text = ""
    for data in devices:
        runs = [run for run in data["runs"] if run["check"] not in COLUMNS]
        if runs:
            text += f"{data['device']}:\n\n| what | right | date | commit |\n|---|---|---|---|\n"
        for run in runs:
            text += f"| {run['subject']} | {result(run)} | {origin(run)} |\n"
        text += "\n" if runs else ""
    return text.rstrip("\n") + "\n"


def compiled(groups: list) -> str:
    """A row for each kernel entry, with the oldest commit at which an architecture was compiled."""
    architectures = [name for name in ARCHITECTURES if any(group["architecture"] == name for group in groups)]
    total, spilled = (sum(group[name] for group in groups) for name in ("compiled", "spilled"))
    compilers = ", ".join(f"`{name}`" for name in sorted({group["compiler"].rstrip(");") for group in groups}))
    text = f"{total:,} specialisations by {compilers}; {spilled} spill within their bounds.\n\n"
    text += f"| kernel entry | {' | '.join(ARCHITECTURES[each] for each in architectures)} | date | commit |\n|{'---|' * (len(architectures) + 3)}\n"
    groups = [group | {"entry": kernel_renames.current(group["entry"])} for group in groups]
    for entry in sorted({group["entry"] for group in groups}):
        found = {group["architecture"]: group for group in groups if group["entry"] == entry}
        cells = [f"{group['compiled']}" + (f", {group['spilled']} spill (most {group['spill_bytes_max']} bytes)" if group["spilled"] else "")
                 if (group := found.get(each)) else "" for each in architectures]
        text += f"| `{entry}` | {' | '.join(cells)} | {origin(min(found.values(), key=lambda group: group['date']))} |\n"
    return text


def tables() -> dict:
    devices = [json.loads(path.read_text()) for path in sorted((ROOT / "bench/results").glob("*/checks.json"))]
    made = {}
    for kind in ("hardware", "cpu", "emulated"):
        text = ""
        for data in (data for data in devices if data["kind"] == kind):
            runs = [run for run in data["runs"] if run["check"] in COLUMNS]
            if kind == "emulated":
                text += rows(runs, "device", list(ARCHITECTURES.values()), lambda run: ARCHITECTURES[run["architecture"]])
            elif runs:
                text += f"{data['device']}:\n\n" + rows(runs, "check", list(COLUMNS), lambda run: run["check"]) + "\n"
        made[kind] = text.rstrip("\n") + "\n"
    made["other"] = listed(devices)
    path = ROOT / "bench/results/compile/matrix.json"
    made["compiled"] = compiled(json.loads(path.read_text())["groups"]) if path.is_file() else "Nothing has been recorded yet.\n"
    return made


def main(check: bool) -> int:
    old = new = PAGE.read_text()
    for name, table in tables().items():
        new, count = marked_table.replaced(new, name, table)
        if count != 1:
            print(f"docs/verified.md: has {count} places for the table {name}", file=sys.stderr)
            return 1
    if check and new != old:
        print("docs/verified.md: its tables are not those of bench/results; run scripts/verified.py", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
