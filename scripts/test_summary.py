"""Says in one line each what failed in a test run, what was not covered and why, and how long each stage took.

Usage: test_summary.py STAGES SECONDS. STAGES is what scripts/stages.sh has written: a line a stage, of its name, exit
code, seconds and the report of its tests, a .json of Meson, a .xml of pytest, a .txt of what was printed, or -. SECONDS
is the time of all. The exit code is 1 when a stage failed.
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as tree
from collections import defaultdict
from pathlib import Path
from typing import Dict, List, Tuple

GONE_WRONG = {"FAIL", "ERROR", "TIMEOUT", "INTERRUPT", "UNEXPECTEDPASS"}
# What tests that pass say of a part of theirs, too.
LESS = re.compile(r"(?m)^(?:skipped|not covered|not covered on this machine): (.+)$")
NAMES_MAX = 6

# Who failed; who was skipped, by reason; who passed in part, by reason.
Found = Tuple[List[str], Dict[str, List[str]], Dict[str, List[str]]]


def of_meson(report: Path) -> Found:
    failed: List[str] = []
    skipped, partly = defaultdict(list), defaultdict(list)
    for line in report.read_text().splitlines():
        test = json.loads(line)
        name = test["name"].rsplit(":", 1)[-1]
        said = test.get("stdout", "") + test.get("stderr", "")
        reasons = LESS.findall(said)
        if test["result"] in GONE_WRONG:
            failed.append(name)
        elif test["result"] == "SKIP":
            skipped[reasons[-1] if reasons else (said.strip().splitlines() or ["no reason is given"])[-1]].append(name)
        for reason in {} if test["result"] == "SKIP" else dict.fromkeys(reasons):
            partly[reason].append(name)
    return failed, skipped, partly


def of_pytest(report: Path) -> Found:
    failed: List[str] = []
    skipped = defaultdict(list)
    for case in tree.parse(report).iter("testcase"):
        place = case.get("classname", "").replace(".", "/")
        name = f"{place}.py::{case.get('name')}" if place else str(case.get("name"))
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
        elif skip is not None and skip.get("type") != "pytest.xfail":
            skipped[skip.get("message") or "no reason is given"].append(Path(place).name)
    return failed, skipped, {}


def of_text(report: Path) -> Found:
    return [], {}, {reason: [] for reason in LESS.findall(report.read_text())}


READERS = {".json": of_meson, ".xml": of_pytest, ".txt": of_text}


def shortened(names: List[str]) -> str:
    once = list(dict.fromkeys(names))
    more = len(once) - NAMES_MAX
    return ", ".join(once[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")


def summary(stages: List[List[str]], seconds: int) -> Tuple[List[str], bool]:
    failed, less = [], []
    for name, code, _, report in stages:
        wrong: List[str] = []
        if report != "-" and Path(report).exists():
            wrong, skipped, partly = READERS[Path(report).suffix](Path(report))
            for why, who in skipped.items():
                less.append(f"not covered: {len(who)} skipped of the {name}: {why} ({shortened(who)})")
            for why, who in partly.items():
                less.append(f"not covered: a part of {shortened(who) or 'the ' + name}: {why}")
        elif report != "-":
            wrong = ["there is no report"]
        if int(code) or wrong:
            failed.append(name + (f" ({shortened(wrong)})" if wrong else ""))
    took = ", ".join(f"{name} {spent} s" for name, _, spent, _ in stages)
    told = [*less, f"took: {took}; {seconds} s in all"]
    return [*told, f"failed: {'; '.join(failed)}" if failed else "nothing failed"], bool(failed)


def main() -> int:
    stages = [line.split("\t") for line in Path(sys.argv[1]).read_text().splitlines()]
    lines, failed = summary(stages, int(sys.argv[2]))
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        lines.insert(-2, "not covered: CUDA devices (scripts/check_device.sh and tests/python run on a machine with one)")
    lines.insert(-2, "not covered: AArch64 hardware (run under qemu by .ci/run)")
    print("", *lines, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
