"""What the first call of a process waits for: kernels from an archive, from the folder of kernels, and from NVRTC.

    python3 bench/first_call.py build/bench/host-overhead ARCHIVE [--repeat N] [--json FILE]

ARCHIVE is what `fdm cache pack` wrote for the device. Each call runs in a process of its own (`host-overhead --first`),
which has made a CUDA context and its tensors before the clock starts. The clock stops when the device has finished.
`archive`: the folder of kernels is empty, and stays so where the archive has all of them. `folder`: a process before
has filled the folder. `NVRTC`: the folder is empty, and there is no archive. `second`: the call after it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

PROBLEMS = [
    (direction, head_dim, causal)
    for direction in ("forward", "backward")
    for head_dim in (64, 128, 256)
    for causal in (0, 1)
]


def times_of(program, problem, folder, archive):
    """Milliseconds by part: plan, kernels, run, all of the first call; second."""
    names = ("FLASH_DMATTN_CACHE_DIR", "FLASH_DMATTN_KERNEL_ARCHIVE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"FLASH_DMATTN_CACHE_DIR": folder, **({"FLASH_DMATTN_KERNEL_ARCHIVE": archive} if archive else {})}
    command = [program, "--first", ",".join(map(str, problem))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"first_call: {' '.join(command)} ended with {run.returncode}: {run.stderr.strip()}")
    words = run.stdout.split()
    return dict(zip(words[::2], map(float, words[1::2])))


def measure(program, problem, archive, repeat):
    """A row of the table. archive_had_all: nothing was written to the folder beside the archive."""
    samples = {"archive": [], "folder": [], "NVRTC": []}
    had_all = True
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            samples["archive"].append(times_of(program, problem, folder, archive))
            had_all &= not any(os.scandir(folder))
        with tempfile.TemporaryDirectory() as folder:
            samples["NVRTC"].append(times_of(program, problem, folder, None))
            samples["folder"].append(times_of(program, problem, folder, None))
    medians = {name: statistics.median(each["all"] for each in rows) for name, rows in samples.items()}
    medians["second"] = statistics.median(each["second"] for rows in samples.values() for each in rows)
    direction, head_dim, causal = problem
    return {
        "direction": direction, "head_dim": head_dim, "causal": causal, "unit": "ms", **medians, "samples": samples,
        "archive_had_all": had_all,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="build/bench/host-overhead")
    parser.add_argument("archive")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = []
    for problem in PROBLEMS:
        row = measure(os.path.abspath(options.program), problem, os.path.abspath(options.archive), options.repeat)
        rows.append(row)
        name = f"{row['direction']}, D {row['head_dim']}{', causal' if row['causal'] else ''}"
        times = ", ".join(f"{each} {row[each]:.1f}" for each in ("archive", "folder", "NVRTC", "second"))
        print(f"{name:24} {times} ms{'' if row['archive_had_all'] else '; some kernels were compiled'}", flush=True)
    if options.json:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        card = subprocess.run(query, capture_output=True, text=True).stdout.strip()
        command = " ".join(["bench/first_call.py", *sys.argv[1:]])
        with open(options.json, "w") as file:
            json.dump({"command": command, "device": card, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
