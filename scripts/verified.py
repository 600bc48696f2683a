#!/usr/bin/env python3
"""verified.py: writes the tables of docs/verified.md from bench/results/*/checks.json and bench/results/compile/matrix.json.

Each table stands between its markers; the prose around them is written by hand. Usage: verified.py [--check]
"""

from __future__ import annotations

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/verified.md"
COLUMNS = ("problems", "memcheck", "racecheck", "initcheck", "synccheck")  # checks that are columns; others are rows of their own
ARCHITECTURES = {"sm_80": "8.0", "sm_86": "8.6", "sm_89": "8.9", "sm_90": "9.0", "sm_100": "10.0", "sm_120": "12.0"}


def letter(number: int) -> str:
    return chr(ord("a") + number % 26) + (str(number // 26) if number >= 26 else "")


class Notes:
    """Texts that several cells of a table share, told once below it."""

    def __init__(self) -> None:
        self.texts: list = []

    def mark(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        return letter(self.texts.index(text))

    def lines(self) -> str:
        return "\n" + "".join(f"- {letter(number)}: {text}\n" for number, text in enumerate(self.texts))


def origin(run: dict) -> str:
    return ", ".join(part for part in (run["date"], f"commit {run['commit']}" if run["commit"] else "commit not recorded",
                                       f"`{run['command']}`" if run.get("command") else "") if part)


def result(run: dict) -> str:
    """What a run found, in a few words."""
    if "result" in run:
        return run["result"]
    right = "not counted" if run["right"] is None else f"{run['right']:,}"
    words = [right] + ([f"**{run['wrong']} wrong**"] if run["wrong"] else [])
    return ", ".join(words + ([f"{run['findings']} findings"] if run.get("findings") else []))


def matrix(runs: list, columns: list, column_of) -> str:
    """A row for each subject, a column for each of `columns`."""
    notes = Notes()
    text = f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}\n"
    for subject in sorted({run["subject"] for run in runs}):
        cells = []
        for column in columns:
            found = [run for run in runs if run["subject"] == subject and column_of(run) == column]
            marks = [notes.mark(each) for run in found for each in (origin(run), run.get("note")) if each]
            cells.append(f"{result(found[0])} ({', '.join(marks)})" if found else "")
        text += f"| `{subject}` | {' | '.join(cells)} |\n"
    return text + notes.lines()


def listed(devices: list) -> str:
    text = ""
    for data in devices:
        runs = [run for run in data["runs"] if run["check"] not in COLUMNS]
        if runs:
            text += f"{data['device']}:\n\n| what | how | right | | when |\n|---|---|---|---|---|\n"
        for run in runs:
            how = f"`{run['command']}`" if run.get("command") else run["check"]
            words = ("", result(run)) if "result" in run else (result(run), run.get("note", ""))
            text += f"| {run['subject']} | {how} | {words[0]} | {words[1]} | {origin({**run, 'command': ''})} |\n"
        text += "\n" if runs else ""
    return text.rstrip("\n") + "\n"


def compiled(groups: list) -> str:
    """A row for each kernel entry, with the commits at which it was compiled."""
    architectures = [name for name in ARCHITECTURES if any(group["architecture"] == name for group in groups)]
    total, spilled = (sum(group[name] for group in groups) for name in ("compiled", "spilled"))
    compilers = ", ".join(f"`{name}`" for name in sorted({group["compiler"] for group in groups}))
    text = f"{total:,} specialisations by {compilers}; {spilled} spill within their bounds.\n\n"
    text += f"| kernel entry | {' | '.join(ARCHITECTURES[each] for each in architectures)} | commit, date |\n|{'---|' * (len(architectures) + 2)}\n"
    for entry in sorted({group["entry"] for group in groups}):
        found = {group["architecture"]: group for group in groups if group["entry"] == entry}
        cells = [f"{group['compiled']}" + (f", {group['spilled']} spill (most {group['spill_bytes_max']} bytes)" if group["spilled"] else "")
                 if (group := found.get(each)) else "" for each in architectures]
        origins = "; ".join(sorted({f"{group['commit']}, {group['date']}" for group in found.values()}))
        text += f"| `{entry}` | {' | '.join(cells)} | {origins} |\n"
    return text


def tables() -> dict:
    devices = [json.loads(path.read_text()) for path in sorted((ROOT / "bench/results").glob("*/checks.json"))]
    made = {}
    for kind in ("hardware", "cpu", "emulated"):
        text = ""
        for data in (data for data in devices if data["kind"] == kind):
            runs = [run for run in data["runs"] if run["check"] in COLUMNS]
            if kind == "emulated":
                columns = [ARCHITECTURES[name] for name in ARCHITECTURES if any(run["architecture"] == name for run in runs)]
                text += matrix(runs, columns, lambda run: ARCHITECTURES[run["architecture"]])
            else:
                columns = [name for name in COLUMNS if any(run["check"] == name for run in runs)]
                if not runs:
                    continue
                text += f"{data['device']}:\n\n" + matrix(runs, columns, lambda run: run["check"]) + "\n"
        made[kind] = text.rstrip("\n") + "\n"
    made["other"] = listed(devices)
    path = ROOT / "bench/results/compile/matrix.json"
    made["compiled"] = compiled(json.loads(path.read_text())["groups"]) if path.is_file() else "Nothing has been recorded yet.\n"
    return made


def main(check: bool) -> int:
    old = new = PAGE.read_text()
    for name, table in tables().items():
        block = f"<!-- {name} -->\n{table}<!-- end of {name} -->"
        new, count = re.subn(f"<!-- {name} -->.*?<!-- end of {name} -->", lambda _: block, new, flags=re.DOTALL)  # noqa: B023
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
