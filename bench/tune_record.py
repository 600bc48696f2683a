#!/usr/bin/env python3
"""tune_record.py: times every way to run a few hundred problems on this machine's CUDA device, for src/tuning's model.

The problems come from a fixed generator (`problems`), so that problem n is the same one everywhere; those with
n % 5 == 0 are held back: scripts/tune_fit.py never fits to them. Any prefix holds all kinds alike. The file is written
after each problem, and a run that was stopped goes on where it ended. It needs `fdm` and the standard library alone.

    bench/tune_record.py --fdm build/fdm --commit abc1234 --out record.json [--count 300] [--seconds-max 480]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

COUNT = 300
MIN_FLOPS, MAX_FLOPS = 5e9, {"forward": 2.2e12, "backward": 1.6e12}
SILENCE_SECONDS = 420  # of a tool that hangs

# (pass, head dim, kind); their number has no factor in common with 5, so that each kind has problems held back.
KINDS = [
    ("forward", 64, "causal"), ("backward", 128, "causal"), ("forward", 128, "decode"), ("forward", 128, "causal"),
    ("backward", 64, "causal"), ("forward", 192, "causal"), ("backward", 192, "causal"), ("forward", 128, "topk"),
    ("backward", 64, "packed"), ("forward", 64, "full"), ("backward", 128, "group"), ("forward", 128, "window"),
    ("backward", 256, "causal"), ("forward", 256, "causal"), ("backward", 32, "causal"), ("forward", 128, "packed"),
    ("backward", 128, "topk"), ("forward", 64, "decode"), ("backward", 128, "window"), ("forward", 32, "causal"),
    ("backward", 128, "mask"), ("forward", 128, "mask"), ("backward", 96, "causal"), ("forward", 96, "causal"),
    ("backward", 64, "full"), ("forward", 128, "full"), ("backward", 128, "full"), ("forward", 64, "window"),
    ("backward", 128, "packed"), ("forward", 64, "topk"), ("backward", 64, "topk"), ("forward", 128, "group"),
    ("backward", 64, "window"), ("forward", 256, "decode"), ("backward", 192, "topk"), ("forward", 64, "packed"),
    ("backward", 64, "group"),
]  # fmt: skip


def pairs_of(kind: str, length: int, window: int) -> float:
    """Pairs that a head's kernel works through, about."""
    if kind == "window":
        return length * min(window, length)
    if kind == "packed":
        return 0.2 * length * length
    return length * length * (1 if kind in ("full", "mask") else 0.5)


def decode_problem(rng: random.Random, head_dim: int) -> dict:
    heads_kv = rng.choice((1, 2, 4, 8))
    return {
        "pass": "forward", "batch": rng.choice((1, 2, 4, 8, 16, 32, 64)), "heads": heads_kv * rng.choice((1, 4, 8)),
        "heads-kv": heads_kv, "seqlen-q": rng.choice((1, 1, 1, 2, 4)),
        "seqlen-k": int(math.exp(rng.uniform(math.log(300), math.log(40000)))), "head-dim": head_dim, "dtype": "bf16",
    }  # fmt: skip


def other_problem(rng: random.Random, which: str, head_dim: int, kind: str) -> dict:
    most = MAX_FLOPS[which] * (0.5 if kind in ("topk", "mask") else 1)
    wanted = math.exp(rng.uniform(math.log(MIN_FLOPS), math.log(most)))
    while True:
        length = int(math.exp(rng.uniform(math.log(300), math.log(40000))))
        batch, heads = rng.choice((1, 1, 2, 3, 4, 8, 16)), rng.choice((1, 2, 4, 8, 12, 16, 32))
        window = rng.choice((256, 512, 1024, 2048, 4096))
        batch = max(batch, 3) if kind == "packed" else batch
        flops = batch * heads * pairs_of(kind, length, window) * 4 * head_dim * (1 if which == "forward" else 2.5)
        small = batch * length * heads * head_dim <= 2**29 and (kind != "mask" or batch * heads * length**2 <= 2**30)
        if wanted / 2 <= flops <= min(wanted * 1.5, most) and small:
            break
    problem = {"pass": which, "batch": batch, "heads": heads, "seqlen-q": length, "head-dim": head_dim, "dtype": "bf16"}
    if kind == "group":
        problem.update({"heads": heads * 4, "heads-kv": heads} if flops < 0.25 * MAX_FLOPS[which] else
                       {"heads": max(heads, 4) // 4 * 4, "heads-kv": max(heads, 4) // 4})  # fmt: skip
    if kind == "packed":
        problem.update({"varlen": True, "total": max(length, int(batch * length * rng.uniform(0.4, 0.9)))})
    if kind == "topk":
        problem["topk"] = min(window, length)
    if kind == "mask":
        problem["mask"] = True
    if kind == "window":
        problem["window"] = f"{window - 1},0"
    if kind in ("causal", "group", "window", "packed"):
        problem["causal"] = True
    return problem


def problem_of(number: int) -> dict:
    rng = random.Random(f"flash-dmattn tune {number}")
    which, head_dim, kind = KINDS[number % len(KINDS)]
    return decode_problem(rng, head_dim) if kind == "decode" else other_problem(rng, which, head_dim, kind)


class Clocks:
    """What nvidia-smi says, twice a second."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []
        query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu",
                 "--format=csv,noheader,nounits", "-lms", "500", "-i", "0"]  # fmt: skip
        try:
            self.process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self.read, daemon=True).start()
        except OSError:
            self.process = None

    def read(self) -> None:
        for line in self.process.stdout:
            try:
                self.rows.append([float(word) for word in line.split(",")])
            except ValueError:
                continue

    def take(self) -> dict | None:
        rows, self.rows = self.rows, []
        if not rows:
            return None
        names = ("sm_mhz", "memory_mhz", "watts", "celsius")
        return {name: statistics.median(row[i] for row in rows) for i, name in enumerate(names)}

    def end(self) -> None:
        if self.process:
            self.process.kill()


def device_facts(fdm: str) -> dict:
    facts = {}
    for key, command in (("info", [fdm, "info", "--json"]), ("nvidia_smi", ["nvidia-smi", "-q", "-d", "CLOCK"])):
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
            facts[key] = json.loads(text) if key == "info" else text
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            facts[key] = str(error)
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader"]
    try:
        facts["gpu"] = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        facts["gpu"] = str(error)
    return facts


def save(path: pathlib.Path, record: dict) -> None:
    """One problem a line; replaced whole."""
    head = {key: value for key, value in record.items() if key != "problems"}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in record["problems"])
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(head, indent=1)[:-2] + ',\n "problems": [\n' + lines + "\n]}\n")
    os.replace(partial, path)


class Recorder:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begin, self.clocks = options, time.monotonic(), Clocks()
        self.path = pathlib.Path(options.out)
        if self.path.exists():
            self.record = json.loads(self.path.read_text())
        else:
            self.record = {
                "what": "every way to run each problem, timed by `fdm tune --exhaustive`; n % 5 == 0 are held back",
                "command": " ".join(sys.argv), "commit": options.commit, "rounds": options.rounds,
                "facts": device_facts(options.fdm), "problems": [],
            }  # fmt: skip

    def left(self) -> list[int]:
        done = {row["number"] for row in self.record["problems"]}
        return [n for n in range(self.options.count) if n not in done]

    def late(self) -> bool:
        return time.monotonic() - self.begin > self.options.seconds_max

    def add(self, number: int, row: dict) -> None:
        row.update(number=number, kind="/".join(map(str, KINDS[number % len(KINDS)])), clocks=self.clocks.take())
        row["device_problem"] = problem_of(number)
        self.record["problems"].append(row)
        if row.get("error"):
            print(f"problem {number}: {row['error']}", file=sys.stderr)
        if len(self.record["problems"]) % 5 == 0:
            save(self.path, self.record)

    def run(self, numbers: list[int]) -> None:
        """One process of the tool; what ends it early is put down to the problem that it was at."""
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.write("".join(json.dumps(problem_of(n)) + "\n" for n in numbers))
            file.flush()
            command = [self.options.fdm, "tune", "--from", file.name, "--exhaustive", "--rounds",
                       str(self.options.rounds), "--seconds", str(self.options.problem_seconds), "--json",
                       "--device", self.options.device]  # fmt: skip
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            timer = None
            at = 0
            try:
                while not self.late():
                    timer = threading.Timer(SILENCE_SECONDS, process.kill)
                    timer.start()
                    line = process.stdout.readline()
                    timer.cancel()
                    if not line:
                        break
                    self.add(numbers[at], json.loads(line))
                    at += 1
            finally:
                if timer:
                    timer.cancel()
                process.kill()
                process.wait()
            if at < len(numbers) and not self.late() and not self.record["problems"][-1:][0].get("error"):
                self.add(numbers[at], {"error": f"fdm ended with {process.returncode}"})

    def finish(self) -> None:
        save(self.path, self.record)
        self.clocks.end()
        wrong = sum(r["state"] == "wrong" for p in self.record["problems"] for r in p.get("rows", ()))
        failed = sum(bool(p.get("error")) for p in self.record["problems"])
        print(f"{self.path}: {len(self.record['problems'])} problems in {time.monotonic() - self.begin:.0f} s, "
              f"{failed} failed, {wrong} ways wrong")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fdm", default="build/fdm")
    parser.add_argument("--device", default="cuda", help="as of fdm tune")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", default="tune_record.json")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--problem-seconds", type=float, default=1.2, help="device time of a problem at most")
    parser.add_argument("--seconds-max", type=float, default=480, help="on the clock, in all")
    parser.add_argument("--list", action="store_true", help="print the problems alone")
    options = parser.parse_args()
    if options.list:
        for n in range(options.count):
            print(json.dumps(problem_of(n)))
        return 0
    recorder = Recorder(options)
    try:
        while recorder.left() and not recorder.late():
            before = len(recorder.record["problems"])
            recorder.run(recorder.left())
            if len(recorder.record["problems"]) == before:
                break
    finally:
        recorder.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
