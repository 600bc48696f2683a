#!/usr/bin/env python3
"""tune_replay.py: what the rules of this tree lose on a record of bench/tune_record.py, without the device.

Every way to run each problem was timed, so that a rule that chooses another way has its time in the record. A choice
that the record does not hold counts as not timed, and its problem as none. `before` is the rules' choice when the
record was made. Problems with n % 5 == 0 are held back from whoever changes a rule.

    bench/tune_replay.py --fdm build/fdm bench/results/nvidia-h200/2026-11-28-tune.json [--out rules.json] [--list PERCENT]
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import statistics
import subprocess
import sys


def choice_of(fdm: str, problem: dict) -> tuple[str, str]:
    command = [fdm, "plan", "--device", problem["device"], "--json", *problem["problem"].split()]
    environment = {**os.environ, "FLASH_DMATTN_TUNE": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    plan = json.loads(done.stdout)
    return plan["kernel"], plan["choice"]


def judge(fdm: str, problem: dict) -> dict:
    timed = {(row["kernel"], row["choice"]): row["seconds"] for row in problem["rows"] if row.get("samples")}
    best = min(timed, key=timed.get)
    before = next((row["kernel"], row["choice"]) for row in problem["rows"] if row.get("rule"))
    now = choice_of(fdm, problem)
    row = {"number": problem["number"], "kind": problem["kind"], "problem": problem["problem"], "best": best[1],
           "before": before[1], "now": now[1], "loss_before": timed[before] / timed[best] - 1,
           "loss_now": timed[now] / timed[best] - 1 if now in timed else None}  # fmt: skip
    return row


def numbers(rows: list[dict]) -> dict:
    """Losses in percent, of the problems whose choice is in the record."""
    known = [row for row in rows if row["loss_now"] is not None]
    found = {"problems": len(rows), "changed": sum(row["now"] != row["before"] for row in rows),
             "not_timed": len(rows) - len(known)}  # fmt: skip
    for name in ("before", "now") if known else ():
        losses = [100 * row["loss_" + name] for row in known]
        found[name] = {"mean": round(statistics.mean(losses), 2), "worst": round(max(losses), 1)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=pathlib.Path)
    parser.add_argument("--fdm", default="build/fdm")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--held-back", action="store_true", help="judge what is held back, too")
    parser.add_argument("--list", type=float, metavar="PERCENT", help="print fitted problems that lose as much")
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    problems = [p for p in record["problems"] if p.get("rows") and (p["number"] % 5 or options.held_back)]
    judged = [judge(options.fdm, problem) for problem in problems]
    fitted = [row for row in judged if row["number"] % 5]
    kinds = collections.defaultdict(list)
    for row in fitted:
        kinds[row["kind"]].append(row)
    found = {"command": " ".join(sys.argv), "commit": options.commit, "record": options.record.name,
             "fitted": numbers(fitted), "fitted_by_kind": {kind: numbers(rows) for kind, rows in sorted(kinds.items())}}
    if options.held_back:
        found["held_back"] = numbers([row for row in judged if row["number"] % 5 == 0])
    for name in found.keys() & {"fitted", "held_back"}:
        print(f"{name}: {json.dumps(found[name])}")
    for row in fitted:
        if options.list is not None and (row["loss_now"] is None or 100 * row["loss_now"] >= options.list):
            print(json.dumps(row))
    if options.out:
        found["problems"] = [row for row in judged if row["now"] != row["before"]]
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
