#!/usr/bin/env python3
"""which_kernel.py: writes the tables of docs/which-kernel.md from what `fdm plan --json` says of ordinary problems.
Usage: which_kernel.py TOOL [--check]

TOOL is the built fdm. A table stands between its markers; the prose around it is written by hand. What ran on a device
is read from bench/results/*/checks.json.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import marked_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/which-kernel.md"
DEVICES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "cpu:avx2", "cpu:avx512", "cpu:avx512_bf16",
           "cpu:amx")
LENGTHS = ("1024", "8192", "65536")  # of problems whose options end with S
TRAINING = "--dtype bf16 --batch 2 --heads 16 --head-dim 128 --seqlen-q 8192"
DECODING = "--dtype bf16 --batch 8 --heads 32 --heads-kv 8 --head-dim 128 --seqlen-q 1 --seqlen-k 8192"
BOTH, FORWARD = ("forward", "backward"), ("forward",)
PROBLEMS = (  # name, passes, options; the later of two equal options holds
    ("causal, D 64", BOTH, f"{TRAINING} --causal --head-dim 64 --seqlen-q S"),
    ("causal, D 128", BOTH, f"{TRAINING} --causal --seqlen-q S"),
    ("causal, D 256", BOTH, f"{TRAINING} --causal --head-dim 256 --seqlen-q S"),
    ("every key", BOTH, TRAINING),
    ("groups of 4 heads", BOTH, f"{TRAINING} --causal --heads-kv 4"),
    ("window", BOTH, f"{TRAINING} --causal --window 1023,0"),
    ("dense mask", BOTH, f"{TRAINING} --mask"),
    ("mask of keys", BOTH, f"{TRAINING} --key-mask"),
    ("key intervals", BOTH, f"{TRAINING} --causal --intervals"),
    ("top-W", BOTH, f"{TRAINING} --causal --intervals --key-bias"),
    ("full bias", BOTH, f"{TRAINING} --causal --bias"),
    ("packed", BOTH, f"{TRAINING} --causal --varlen"),
    ("sinks", BOTH, f"{TRAINING} --causal --sink"),
    ("D 192, Dv 128", BOTH, f"{TRAINING} --causal --head-dim 192 --head-dim-v 128"),
    ("D 512", BOTH, f"{TRAINING} --causal --head-dim 512"),
    ("float32, D 64", BOTH, f"{TRAINING} --causal --dtype fp32 --head-dim 64"),
    ("float32, D 128", BOTH, f"{TRAINING} --causal --dtype fp32"),
    ("1 query", FORWARD, DECODING),
    ("1 query, 1 sequence", FORWARD, f"{DECODING} --batch 1 --seqlen-k 65536"),
    ("1 query, slots of top-W", FORWARD, f"{DECODING} --seqlen-k 2048 --key-bias"),
    ("1 query, D 576, Dv 512", FORWARD, f"{DECODING} --heads-kv 1 --head-dim 576 --head-dim-v 512"),
)
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("FLASH_DMATTN_")}


def shortened(options: str) -> str:
    """Without the options that a later one replaces."""
    values = {option.split()[0]: option for option in re.findall(r"--[\w-]+(?: [\w,.]+)?", options)}
    return " ".join(values.values())


def plan(tool: str, device: str, each_pass: str, options: str) -> tuple[str, ...]:
    """Kernel, choice, shared memory, reason; or the reason why there is none."""
    command = [tool, "plan", "--json", "--device", device, "--pass", each_pass, *options.split()]
    run = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    if run.returncode:
        refused = re.match(r"fdm: no kernel takes this problem on [^ ]+: (.*)\n$", run.stderr)
        if not refused:
            raise SystemExit(f"which_kernel: {' '.join(command)}: {run.stderr.strip()}")
        return "none", "", "", refused.group(1)
    made = json.loads(run.stdout)
    shared = "" if made["shared_bytes"] is None else f"{made['shared_bytes'] / 1024:.4g}"
    return made["kernel"], made["choice"], shared, made["reason"]


def named(problems: list[tuple[str, str]]) -> str:
    """The names of problems; those that differ in length alone as one."""
    lengths: dict[str, list[str]] = {}
    for name, length in problems:
        lengths.setdefault(name, []).append(length)
    return "; ".join(name + (f", S {', '.join(each)}" if each[0] else "") for name, each in lengths.items())


def recorded(device: str) -> dict[str, set[str]]:
    """Kernels that ran on devices of this kind and on emulated ones, and the kernel entries compiled for them."""
    found: dict[str, set[str]] = {"hardware": set(), "emulated": set(), "cpu": set()}
    for path in sorted((ROOT / "bench/results").glob("*/checks.json")):
        data = json.loads(path.read_text())
        here = f"({device[3:-1]}.{device[-1]})" in data["device"]
        found[data["kind"]] |= {run["subject"] for run in data["runs"] if here or run.get("architecture") == device}
    groups = json.loads((ROOT / "bench/results/compile/matrix.json").read_text())["groups"]
    return found | {"compiled": {group["entry"] for group in groups if group["architecture"] == device}}


def verified(device: str, kernels: list[str]) -> str:
    """Which of these kernels were run or compiled for such a device."""
    if device.startswith("cpu"):
        return "[Verified](verified.md#cpu-kernels) names the machines that ran them."
    found = recorded(device)
    found["compiled"] = {kernel for kernel in kernels
                         if any(entry.startswith(kernel.replace(".", "_")) for entry in found["compiled"])}

    def share(kind: str) -> str:
        names = [kernel for kernel in kernels if kernel in found[kind]]
        if names == kernels:
            return "all of these kernels"
        return ", ".join(f"`{name}`" for name in names) or "**none of these kernels**"

    lines = (f"- [Devices of this kind](verified.md#cuda-kernels-on-hardware) ran {share('hardware')}.",
             f"- [Emulated devices](verified.md#cuda-kernels-on-emulated-devices) ran {share('emulated')}.",
             f"- NVRTC [compiled](verified.md#cuda-kernels-compiled) {share('compiled')}.")
    return "\n".join(textwrap.fill(line, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
                     for line in lines)


def pass_table(tool: str, device: str, each_pass: str) -> tuple[str, set[str]]:
    """A row for each plan, with the problems that get it; and the kernels."""
    asked = [(name, length, options.removesuffix("S") + length)
             for name, passes, options in PROBLEMS if each_pass in passes
             for length in (LENGTHS if options.endswith(" S") else ("",))]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        plans = list(pool.map(lambda each: plan(tool, device, each_pass, each[2]), asked))
    rows: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for (name, length, _), made in zip(asked, plans):
        rows.setdefault(made, []).append((name, length))
    text = f"The {each_pass}:\n\n| problem | kernel, choice | shared, KB | because |\n|---|---|---|---|\n"
    for (kernel, choice, shared, reason), problems in rows.items():
        codes = "none" if kernel == "none" else f"`{kernel}`, `{choice}`"
        reason = reason.replace("|", "\\|")
        text += f"| {named(problems)} | {codes} | {shared} | {reason} |\n"
    return text, {made[0] for made in plans} - {"none"}


def device_section(tool: str, device: str) -> str:
    made = [pass_table(tool, device, each_pass) for each_pass in BOTH]
    kernels = sorted(set().union(*(kernels for _, kernels in made)))
    return "\n".join([f"## `{device}`\n", f"{verified(device, kernels)}\n", *(text for text, _ in made)])


def tables(tool: str) -> dict[str, str]:
    problems = "| problem | `fdm plan` |\n|---|---|\n"
    problems += "".join(f"| {name} | `{shortened(options)}` |\n" for name, _, options in PROBLEMS)
    return {"problems": problems, "devices": "\n".join(device_section(tool, device) for device in DEVICES)}


def main(tool: str, check: bool) -> int:
    old = new = PAGE.read_text()
    for name, table in tables(tool).items():
        new, count = marked_table.replaced(new, name, table)
        if count != 1:
            print(f"{PAGE.name}: has {count} places for the table {name}", file=sys.stderr)
            return 1
    if check and new != old:
        print(f"{PAGE.name}: tables are not what fdm plan says; run scripts/which_kernel.py {tool}", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(new)
    print(f"which-kernel: the plans of {len(DEVICES)} devices {'are' if check else 'written from'} the library's")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--check" in sys.argv[2:]))
