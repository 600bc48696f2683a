#!/usr/bin/env python3
"""occupancy.py: resident warps of the CUDA kernels' tiles, in theory and counted by the profiler (ncu) on a CUDA device.

Usage: occupancy.py --measure FDM FILE [REGEX]     on a machine with a device, ncu, PyTorch and the installed package
       occupancy.py --write FILE                   writes the tables of docs/measured.md from such a FILE

FDM is the tool. Every tile of the kernels whose names match REGEX (all of them) that `fdm plan --variants` lists runs once, on
a problem that fills the device several times over. Theory is `fdm plan --resources` (of tiles that are planned for a device
with less memory: the profiler's); the rest are hardware counters, the device's clocks left as they are.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import marked_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEVICE = "sm_90"
# What each row of the table is made from: a name for the result, and the profiler's. The first that the profiler knows.
METRICS = {
    "microseconds": ("gpu__time_duration.sum",),
    "waves": ("launch__waves_per_multiprocessor",),
    "registers": ("launch__registers_per_thread",),
    "achieved": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "theoretical": ("sm__maximum_warps_per_active_cycle_pct",),
    "tensor": ("sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
               "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"),
    "conflicts": ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
    "wavefronts": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),
}

# ---- what to run -----------------------------------------------------------------------------------------------------


def problem(direction: str, head_dim: int, *, batch: int = 8, heads: int = 0, heads_kv: int = 0, rows: int = 2048,
            keys: int = 2048, causal: bool = False, features: tuple = ()) -> dict:
    heads = heads or max(2048 // head_dim, 1)
    return {"pass": direction, "batch": batch, "heads": heads, "heads_kv": heads_kv or heads, "rows": rows, "keys": keys,
            "head_dim": head_dim, "causal": causal, "features": list(features)}


def problems() -> list:
    """(problem, memory of the pretended device): what is alike in several of them runs once."""
    found = []
    for head_dim in (64, 128, 256):
        found += [(problem("forward", head_dim, causal=causal, features=features), "")
                  for causal, features in ((False, ()), (True, ()), (False, ("intervals",)), (False, ("mask",)), (False, ("softcap",)))]
        found += [(problem("forward", head_dim, batch=160, heads=32, heads_kv=8, rows=1, keys=4096), memory)
                  for memory in ("", ":smem=99K")]
    for head_dim in (320, 384, 512, 1024):
        found += [(problem("forward", head_dim), memory) for memory in ("", ":smem=163K", ":smem=99K")]
        found.append((problem("forward", head_dim, features=("mask", "intervals", "softcap")), ""))
    return found + [(problem("backward", head_dim, batch=4), "") for head_dim in (32, 64, 96, 128, 192, 256)]


def asked(fdm: str, p: dict, memory: str, *words: str) -> dict | None:
    """What `fdm plan --json` says of a problem; None when it refuses."""
    command = [fdm, "plan", "--device", DEVICE + memory, "--pass", p["pass"], "--dtype", "bf16", "--json", *words,
               *(word for name, value in (("batch", p["batch"]), ("heads", p["heads"]), ("heads-kv", p["heads_kv"]),
                                          ("seqlen-q", p["rows"]), ("seqlen-k", p["keys"]), ("head-dim", p["head_dim"]))
                 for word in (f"--{name}", str(value))),
               *(["--causal"] if p["causal"] else []),
               *(word for name in p["features"] for word in ([f"--{name}", "20"] if name == "softcap" else [f"--{name}"]))]
    done = subprocess.run(command, capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else None


def wishes(fdm: str, names: str) -> list:
    """(problem, memory, choice code) of every variant of the kernels that are asked for."""
    return [(p, memory, code) for p, memory in problems()
            for kernel, codes in (asked(fdm, p, memory, "--variants") or {}).items() if re.search(names, kernel) for code in codes]


def plans(fdm: str, wish: tuple) -> list:
    """One entry for each of the family's own kernels that the plan launches, with what it takes of the device."""
    p, memory, code = wish
    made = asked(fdm, p, memory, "--kernel", code, "--resources")
    return [{"problem": p, "memory": memory, "forced": code, "kernel": made["kernel"], "choice": made["choice"],
             "reason": made["reason"], "theory": each}
            for each in (made["resources"] if made else []) if each["entry"].startswith(made["family"] + "_")]


def tiles(fdm: str, names: str) -> list:
    """One entry a tile; compiles all of them at once."""
    with ThreadPoolExecutor() as pool:
        found = [each for some in pool.map(lambda wish: plans(fdm, wish), wishes(fdm, names)) for each in some]
    kept: dict = {}
    for each in found:
        p = each["problem"]
        kept.setdefault((each["kernel"], each["choice"], each["theory"]["entry"], p["head_dim"], p["causal"], str(p["features"]),
                         each["theory"]["shared_bytes"]), each)
    return list(kept.values())


# ---- running them under the profiler ---------------------------------------------------------------------------------


def launch(rows: list) -> None:
    """Each once between the profiler's start and stop, after a run that makes it ready."""
    import torch
    sys.path.insert(0, str(ROOT / "bench"))
    from bench_selection import run_as

    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    for _, tile in itertools.groupby(rows, key=lambda row: (str(row["problem"]), row["memory"], row["forced"])):
        row = next(tile)  # a tile's kernels are launched by one call
        p = row["problem"]
        q = normal(p["batch"], p["rows"], p["heads"], p["head_dim"])
        k, v = (normal(p["batch"], p["keys"], p["heads_kv"], p["head_dim"]) for _ in range(2))
        mask = start = end = None
        if "mask" in p["features"]:
            mask = torch.rand(1, 1, p["rows"], p["keys"], device="cuda") < 0.5
        if "intervals" in p["features"]:
            start = torch.zeros(1, p["heads_kv"], p["keys"], dtype=torch.int32, device="cuda")
            end = torch.randint(1, p["rows"] + 1, start.shape, dtype=torch.int32, device="cuda")
        softcap = 20.0 if "softcap" in p["features"] else 0.0
        out = torch.empty_like(q)
        lse = torch.empty(p["batch"], p["heads"], p["rows"], device="cuda")
        tensors = dict(q=q, k=k, v=v, mask=mask, interval_start=start, interval_end=end, out=out, lse=lse)
        if p["pass"] == "backward":
            run_as(None, None, tensors, p["causal"], softcap)
            gradients = {f"d{name}": torch.empty_like(tensors[name]) for name in "qkv"}
            tensors |= {"dout": torch.randn_like(out), **gradients}
        device = DEVICE + row["memory"] if row["memory"] else None
        for profiled in (False, True):
            torch.cuda.synchronize()
            if profiled:
                torch.cuda.cudart().cudaProfilerStart()
            ran = run_as(device, row["forced"], tensors, p["causal"], softcap)["choice"]
            torch.cuda.synchronize()
            if profiled:
                torch.cuda.cudart().cudaProfilerStop()
        if ran != row["choice"]:
            sys.exit(f"{row['choice']} was planned, and {ran} ran")


def known_metrics() -> dict:
    """Of each result the first of its metrics that the profiler has for this device."""
    said = subprocess.run(["ncu", "--query-metrics", "--chip", "gh100"], capture_output=True, text=True).stdout
    bases = set(re.findall(r"^(\w+)", said, flags=re.MULTILINE))
    return {name: ([metric for metric in metrics if metric.split(".")[0] in bases] or metrics)[0]
            for name, metrics in METRICS.items()}


def number(text: str) -> float:
    return float(text.replace(",", ""))


def join(rows: list, text: str, metrics: dict) -> None:
    """Adds what the profiler counted, a launch a row in the same order. text: ncu --csv --page raw."""
    table = list(csv.reader(io.StringIO(text[text.index('"ID"'):])))
    names, units, launches = table[0], table[1], [line for line in table[2:] if line]
    if len(launches) != len(rows):
        sys.exit(f"{len(rows)} kernels were launched, the profiler saw {len(launches)}")
    for row, line in zip(rows, launches):
        if line[names.index("Kernel Name")] != row["theory"]["entry"]:
            sys.exit(f"the profiler saw {line[names.index('Kernel Name')]} in the place of {row['theory']['entry']}")
        row["counted"] = {}
        for name, metric in metrics.items():
            if metric in names and line[names.index(metric)] not in ("", "n/a"):
                scale = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1, "us": 1, "msecond": 1e3, "ms": 1e3}.get(
                    units[names.index(metric)], 1)
                row["counted"][name] = number(line[names.index(metric)]) * scale


def measure(fdm: str, path: pathlib.Path, names: str) -> None:
    rows = tiles(fdm, names)
    entries = "|".join(sorted({row["theory"]["entry"] for row in rows}))
    metrics = known_metrics()
    with tempfile.TemporaryDirectory() as folder:
        listed = pathlib.Path(folder) / "rows.json"
        listed.write_text(json.dumps(rows))
        done = subprocess.run(
            ["ncu", "--csv", "--page", "raw", "--profile-from-start", "off", "--clock-control", "none", "--cache-control",
             "none", "--kernel-name", f"regex:^({entries})$", "--metrics", ",".join(metrics.values()), sys.executable, __file__,
             "--launch", str(listed)], capture_output=True, text=True)
    if done.returncode != 0 or '"ID"' not in done.stdout:
        sys.exit(f"ncu: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    join(rows, done.stdout, metrics)
    said = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True,
                          text=True).stdout.strip()
    version = re.search(r"Version ([\d.]+)", subprocess.run(["ncu", "--version"], capture_output=True, text=True).stdout)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    facts = {"device": said, "ncu": version and version[1], "commit": commit, "command": " ".join(sys.argv)}
    path.write_text(json.dumps({"facts": facts, "metrics": metrics, "tiles": rows}, indent=1) + "\n")


# ---- the tables ------------------------------------------------------------------------------------------------------


def shown(row: dict) -> str:
    p = row["problem"]
    words = [f"D {p['head_dim']}", *(["causal"] if p["causal"] else []), *p["features"],
             *([row["memory"].removeprefix(":smem=").replace("K", " KB")] if row["memory"] else [])]
    return ", ".join(words)


def line_of(row: dict) -> str:
    theory, counted = row["theory"], row["counted"]
    warps = theory["warps_per_sm"]
    if row["memory"]:  # the plan's theory is that of the pretended device, the counters are of this one
        warps = round(counted["theoretical"] / 100 * theory["max_warps"])
    percent = 100 * warps / theory["max_warps"]
    share = counted["achieved"] / percent
    conflicts = 100 * counted["conflicts"] / max(counted["wavefronts"], 1)
    return (f"| {shown(row)} | `{row['choice']}` | {counted['registers']:.0f} | {theory['shared_bytes'] / 1024:.4g} | "
            f"{warps} of {theory['max_warps']} | {percent:.1f} | {counted['achieved']:.1f} | {share:.2f} | "
            f"{counted['waves']:.1f} | {counted['tensor']:.0f} | {conflicts:.2f} |\n")


HEAD = ("| problem | tile | registers | KB | warps in theory | % | achieved, % | share | waves | tensor pipe, % | bank "
        "conflicts, % |\n|---|---|---|---|---|---|---|---|---|---|---|\n")


def table(data: dict, direction: str) -> str:
    facts = data["facts"]
    origin = f"{facts['device']}, ncu {facts['ncu']}, commit {facts['commit'][:7]}, `{facts['path']}`.\n\n"
    return origin + HEAD + "".join(line_of(row) for row in data["tiles"] if row["problem"]["pass"] == direction)


def write(path: pathlib.Path, check: bool = False) -> int:
    data = json.loads(path.read_text())
    data["facts"]["path"] = str(path.resolve().relative_to(ROOT))
    different = 0
    for page, direction in (("docs/measured.md", "forward"), ("docs/measured.md", "backward")):
        old = (ROOT / page).read_text()
        new, count = marked_table.replaced(old, f"{direction} occupancy", table(data, direction))
        different += count != 1 or new != old
        if not check:
            (ROOT / page).write_text(new)
    return different if check else 0


def main() -> int:
    if sys.argv[1] == "--launch":
        launch(json.loads(pathlib.Path(sys.argv[2]).read_text()))
    elif sys.argv[1] == "--measure":
        measure(sys.argv[2], pathlib.Path(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "")
    else:
        return write(pathlib.Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
