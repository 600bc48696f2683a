#!/usr/bin/env python3
"""tune_check.py: is a tuned choice ever slower than the rules', and what are the rules worth against a fixed tile?

    bench/tune_check.py held-back --fdm build/fdm --commit abc1234 --out tuned.json
    bench/tune_check.py fixed --fdm build/fdm --commit abc1234 --out fixed.json
    bench/tune_check.py companions --fdm build/fdm --commit abc1234 --out companions.json

held-back: the problems of tune_record.py with n % 5 == 0 are tuned by `fdm tune`; then every way is timed again, so that
a choice is judged by samples that did not choose it. fixed: backwards of long sequences; the rules' choice, the rules'
choice of the mma family, and the smallest tile of that family that fits every device from 8.0 on. companions: products
and softmaxes as held-back's problems are. A run that --seconds-max ends keeps what it has. bench/tune_device.sh runs the
three. It needs `fdm` and the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import tune_record

# Of head dims up to: the code of 99 KB devices, on any device the same tile (docs/backward-tiles.md).
FIXED = {32: "64x128_VinRegs", 64: "64x128_VinRegs", 128: "64x64_VinRegs", 192: "64x64_VinRegs", 256: "64x32_VinRegs"}


PRODUCTS = [
    {"op": "gemm", "M": m, "N": n, "K": k, "layout": layout, "dtype": dtype}
    for m, n, k in ((1, 4096, 4096), (8, 14336, 4096), (64, 4096, 4096), (300, 5120, 1024), (1000, 1000, 1000),
                    (2048, 2048, 8192), (4096, 4096, 4096), (8192, 1024, 4096), (16384, 512, 512))
    for layout, dtype in (("NN", "bf16"), ("NT", "fp16"))
]  # fmt: skip
SOFTMAXES = [
    {"op": "softmax", "pass": which, "rows": rows, "columns": columns, "dtype": dtype}
    for rows, columns in ((8192, 128), (4096, 4096), (4096, 32000), (512, 131072), (16, 262144), (1, 1000000))
    for which, dtype in (("forward", "bf16"), ("backward", "bf16"), ("forward", "fp32"))
]  # fmt: skip


def tune(options: argparse.Namespace, share: float, problems: list[dict], *words: str) -> list[dict]:
    """A line for each problem; at most this share of the run's time."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file, tempfile.TemporaryFile("w+") as out:
        file.write("".join(json.dumps(problem) + "\n" for problem in problems))
        file.flush()
        command = [options.fdm, "tune", "--from", file.name, "--device", options.device, "--no-keep", "--json", *words]
        process = subprocess.Popen(command, stdout=out)
        try:
            process.wait(share * options.seconds_max)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        out.seek(0)
        return [json.loads(line) for line in out if line.endswith("\n")]


def seconds_of(row: dict, choice: str) -> float | None:
    return next((way["seconds"] for way in row["rows"] if way["choice"] == choice and "seconds" in way), None)


def check_tuned(options: argparse.Namespace, problems: list[dict]) -> dict:
    tuned = tune(options, 0.4, problems)
    again = tune(options, 0.6, problems, "--exhaustive", "--rounds", "9", "--seconds", "1.5")
    judged = []
    for first, second in zip(tuned, again):  # fewer, where the time ended one of them
        if first.get("error") or second.get("error"):
            judged.append({"problem": first["problem"], "error": first.get("error") or second.get("error")})
            continue
        rule = second["rows"][0]["seconds"]
        chosen = seconds_of(second, first["best"]) or rule
        best = min(way["seconds"] for way in second["rows"] if "seconds" in way)
        judged.append({
            "problem": first["problem"], "choice": first["best"], "rule": second["rows"][0]["choice"],
            "tuned_over_rule": chosen / rule, "tuned_loss": chosen / best - 1, "rule_loss": rule / best - 1,
            "tuning_device_seconds": first["device_seconds"], "tuning_compile_seconds": first["compile_seconds"],
        })  # fmt: skip
    right = [row for row in judged if "error" not in row]
    if right:
        print(f"{len(right)} problems: tuned over rule at most {max(row['tuned_over_rule'] for row in right):.3f}, "
              f"median {statistics.median(row['tuned_over_rule'] for row in right):.3f}; loss of tuned choices mean "
              f"{statistics.mean(row['tuned_loss'] for row in right):.4f}, of the rules "
              f"{statistics.mean(row['rule_loss'] for row in right):.4f}")  # fmt: skip
    return {"problems": len(problems), "judged": judged}


def check_fixed(options: argparse.Namespace) -> dict:
    problems = [
        {"pass": "backward", "batch": max(1, 16384 // length), "heads": 16, "seqlen-q": length, "head-dim": head_dim,
         "dtype": "bf16", **({"causal": True} if causal else {})}
        for head_dim in FIXED for length in (4096, 8192, 16384) for causal in (True, False)
    ]  # fmt: skip
    judged = []
    for row in tune(options, 1, problems, "--exhaustive", "--rounds", "9"):
        problem = row["problem"].split()
        head_dim = int(problem[problem.index("--head-dim") + 1])
        if row.get("error"):
            judged.append({"problem": row["problem"], "error": row["error"]})
            continue
        mma = [way for way in row["rows"] if way["kernel"] == "mma.backward" and "seconds" in way]
        plan = subprocess.run([options.fdm, "plan", "--device", "sm_90", "--family", "mma", "--json", *problem],
                              stdout=subprocess.PIPE, text=True, check=True)  # fmt: skip
        rule = seconds_of(row, json.loads(plan.stdout)["choice"])
        fixed = next((way["seconds"] for way in mma if way["choice"].endswith("_" + FIXED[head_dim])), None)
        best = row["rows"][0]["seconds"]
        judged.append({"problem": row["problem"], "fixed_seconds": fixed, "mma_seconds": rule, "rules_seconds": best})
        if fixed and rule:
            print(f"{row['problem']}: mma {100 * (1 - rule / fixed):.1f} % less time than {FIXED[head_dim]}, "
                  f"the rules' choice {100 * (1 - best / fixed):.1f} %")  # fmt: skip
    return {"problems": len(problems), "judged": judged}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("held-back", "fixed", "companions"))
    parser.add_argument("--fdm", default="build/fdm")
    parser.add_argument("--device", default="cuda", help="as of fdm tune")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--count", type=int, default=tune_record.COUNT)
    parser.add_argument("--seconds-max", type=float, default=3600, help="on the clock, in all")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args()
    facts = tune_record.device_facts(options.fdm)["gpu"]
    if options.what == "fixed":
        found = check_fixed(options)
    elif options.what == "companions":
        found = check_tuned(options, PRODUCTS + SOFTMAXES)
    else:
        found = check_tuned(options, [tune_record.problem_of(n) for n in range(0, options.count, 5)])
    record = {"command": " ".join(sys.argv), "commit": options.commit, "gpu": facts, **found}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
