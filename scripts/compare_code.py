#!/usr/bin/env python3
"""compare_code.py: whether the CUDA kernels of this tree have the machine code that they had at a commit.
Usage: compare_code.py COMMIT [OPTION of `fdm-checks compile`]...

It compiles the same specialisations of both trees without a device, and compares the hashes that `fdm-checks compile
--verbose` prints. A specialisation is an architecture, a kernel entry and the constants that are not 0. Each that
differs is named with both hashes and both counts of registers. The commit is built in build-code/, where its hashes
stay for the next comparison with the same options and compiler. Exit code: 0 all are the same, 1 some differ or stand
on one side alone.

    scripts/compare_code.py HEAD --arch sm_90 --entry hopper_ --share 0/16
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import subprocess
import sys

import kernel_renames

ROOT = pathlib.Path(__file__).resolve().parent.parent
CODE = re.compile(r"(?:fine|WRONG) (\S+) (\S+): (\d+) registers, (\d+) spill bytes, \d+ remarks, code ([0-9a-f]{16})")
NO_CODE = "code " + "0" * 16  # of what was not compiled

Specialisation = tuple[str, str, str]  # architecture, entry, constants
Codes = dict[Specialisation, tuple[str, int, int]]  # hash, registers, spilled bytes


def codes_of(text: str) -> Codes:
    """What `fdm-checks compile --verbose` has printed; the order of constants does not matter."""
    codes = {}
    lines = text.splitlines()
    for line, constants in zip(lines, lines[1:] + [""], strict=True):
        if found := CODE.match(line):
            arch, entry, registers, spilled, code = found.groups()
            codes[arch, kernel_renames.current(entry), " ".join(sorted(constants.split()))] = (code, int(registers), int(spilled))
    return codes


def differences(before: Codes, after: Codes) -> list[str]:
    """A line for each specialisation that both have with other code, and one for those that one side alone has."""
    lines = []
    for key in sorted(before.keys() & after.keys()):
        if before[key][0] != after[key][0]:
            old, new = before[key], after[key]
            lines.append(f"{key[0]} {key[1]}: {old[0]}, {old[1]} registers, {old[2]} spilled bytes; "
                         f"now {new[0]}, {new[1]}, {new[2]}: {key[2]}")
    for name, alone in (("before", before.keys() - after.keys()), ("now", after.keys() - before.keys())):
        if alone:
            lines.append(f"{len(alone)} specialisations stand {name} alone, such as {' '.join(min(alone))}")
    return lines


def run(*command: str | pathlib.Path, folder: pathlib.Path = ROOT) -> str:
    made = subprocess.run(command, cwd=folder, check=False, stdout=subprocess.PIPE, text=True)
    if made.returncode:
        sys.exit(f"compare_code.py: {command[0]} failed with exit code {made.returncode} in {folder}\n{made.stdout}")
    return made.stdout


def build(folder: pathlib.Path) -> pathlib.Path:
    if not (folder / "build/build.ninja").exists():
        run("meson", "setup", "build", "-Dtests=true", folder=folder)
    run("ninja", "-C", "build", "--quiet", "tests/fdm-checks", folder=folder)
    return folder / "build/tests/fdm-checks"


def compile_with(checks: pathlib.Path, options: list[str]) -> str:
    """Spills are no failure here: both trees may have them."""
    made = subprocess.run([checks, "compile", "--verbose", *options], check=False, stdout=subprocess.PIPE, text=True)
    if made.returncode not in (0, 1):
        sys.exit(made.returncode)
    if NO_CODE in made.stdout:
        sys.exit("compare_code.py: not all was compiled: " + next(x for x in made.stdout.splitlines() if NO_CODE in x))
    return made.stdout


def text_at(commit: str, options: list[str]) -> str:
    """Of a commit, which is unpacked and built where it was not."""
    folder = ROOT / "build-code" / commit
    name = hashlib.sha256("\0".join([os.environ.get("VIRTUAL_ENV", ""), *options]).encode()).hexdigest()[:16]
    kept = folder / f"codes-{name}.txt"
    if kept.exists():
        return kept.read_text()
    if not (folder / "meson.build").exists():
        folder.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    text = compile_with(build(folder), options)
    kept.write_text(text)
    return text


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print((__doc__ or "").strip())
        return 2
    commit = run("git", "rev-parse", "--verify", f"{arguments[0]}^{{commit}}").strip()
    before = codes_of(text_at(commit, arguments[1:]))
    after = codes_of(compile_with(build(ROOT), arguments[1:]))
    lines = differences(before, after)
    print("\n".join([*lines, f"{len(before.keys() & after.keys())} specialisations compared with {commit[:8]}, "
                             f"{sum(': ' in line for line in lines)} have other code"]))
    return 1 if lines or not before else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
