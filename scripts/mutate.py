#!/usr/bin/env python3
"""mutate.py: changes one line of host code at a time and runs the test that must fail for it.

Usage: mutate.py [--json FILE] [NUMBER...]    all of scripts/mutations.py, or those; in a copy of the tree in build-mutate
       mutate.py --check                      only whether each old line stands exactly once in its file; takes no time

A mutation is caught when its test fails, ends by a signal, or does not end in time. One that does not compile, or whose
old line is not there exactly once, is an error of the list. The exit code is 0 when all are caught. --json: what was
found, with command and commit, for bench/results/mutations.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

from mutations import MUTATIONS, Mutation

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build-mutate"
TREE, BUILD = WORK / "tree", WORK / "build"
SECONDS_MAX = 120  # of a test; an endless loop is caught as well
JOBS = 2
NOT_COMPILED = "does not compile"


# ---- the list ----


def lines_of(path: pathlib.Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


def places(root: pathlib.Path, mutation: Mutation) -> list[int]:
    path = root / mutation.file
    return [number for number, line in enumerate(lines_of(path)) if line.strip() == mutation.old] if path.is_file() else []


def faults_of_list(root: pathlib.Path) -> list[str]:
    faults, builds = [], "".join(path.read_text(encoding="utf-8") for path in sorted((root / "tests").rglob("meson.build")))
    for number, mutation in enumerate(MUTATIONS, 1):
        found = len(places(root, mutation))
        if found != 1:
            faults.append(f"mutation {number}: {mutation.file} has the line {found} times, not once: {mutation.old}")
        if f"'{mutation.test}'" not in builds:
            faults.append(f"mutation {number}: no test is called {mutation.test}")
        if mutation.old == mutation.new:
            faults.append(f"mutation {number}: the new line is the old one: {mutation.old}")
    return faults


def mutate(root: pathlib.Path, mutation: Mutation) -> None:
    (number,) = places(root, mutation)
    lines = lines_of(root / mutation.file)
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    lines[number] = f"{indent}{mutation.new}\n"
    (root / mutation.file).write_text("".join(lines), encoding="utf-8")


# ---- the copy ----


def copy_tree() -> None:
    """What git knows and does not ignore; a file that is as it was keeps its time and is not compiled again."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
    for path in [path for path in TREE.rglob("*") if path.is_file()] if TREE.is_dir() else []:
        if path.relative_to(TREE).as_posix() not in names:
            path.unlink()
    for name in names:
        new, old = ROOT / name, TREE / name
        if not old.is_file() or old.read_bytes() != new.read_bytes():
            old.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(new, old)
            shutil.copymode(new, old)


PATH = f"{ROOT / '.venv/bin'}{os.pathsep}{os.environ.get('PATH', '')}"


def run(*command: str | pathlib.Path, **options) -> subprocess.CompletedProcess:
    options["env"] = options.get("env", os.environ) | {"PATH": PATH}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, errors="replace", **options)


def set_up() -> None:
    if not (BUILD / "build.ninja").is_file():
        done = run("meson", "setup", BUILD, TREE, "-Doptimization=1", "-Dcli=false", "-Dtests=true")  # no test looks at speed
        if done.returncode:
            sys.exit(f"mutate: the copy cannot be set up:\n{done.stdout}{done.stderr}")


def tests_of_build() -> dict[str, dict]:
    """Of each test the command, the environment, and the files to build before it."""
    introspect = {what: json.loads(run("meson", "introspect", BUILD, f"--{what}").stdout) for what in ("tests", "targets")}
    files = {target["id"]: [os.path.relpath(name, BUILD) for name in target["filename"]] for target in introspect["targets"]}
    return {test["name"]: {"command": test["cmd"], "env": test["env"], "files": [name for each in test["depends"] for name in files[each]]}
            for test in introspect["tests"]}


def build(tests: list[dict]) -> subprocess.CompletedProcess:
    return run("ninja", "-C", BUILD, f"-j{JOBS}", *sorted({name for test in tests for name in test["files"]}))


def failure_of(test: dict) -> str:
    """In a word, why the test failed; "" when it passed."""
    try:
        done = run(*test["command"], cwd=BUILD, env=os.environ | test["env"], timeout=SECONDS_MAX)
    except subprocess.TimeoutExpired:
        return f"did not end in {SECONDS_MAX} s"
    return "" if done.returncode == 0 else f"signal {-done.returncode}" if done.returncode < 0 else "failed"


# ---- the run ----


def said_by(*command: str) -> str:
    return run(*command, cwd=ROOT).stdout.strip()


def try_mutation(mutation: Mutation, tests: dict[str, dict]) -> str:
    """How its test failed, or "escaped"."""
    before = (TREE / mutation.file).read_bytes()
    mutate(TREE, mutation)
    try:
        done = build([tests[mutation.test]])
        return f"{NOT_COMPILED}: {done.stdout.strip().splitlines()[-1]}" if done.returncode else failure_of(tests[mutation.test]) or "escaped"
    finally:
        (TREE / mutation.file).write_bytes(before)


def expect_passing(tests: dict[str, dict], names: list[str]) -> None:
    done = build([tests[name] for name in names])
    if done.returncode:
        sys.exit(f"mutate: the copy does not compile:\n{done.stdout[-3000:]}")
    failing = {name: why for name in names if (why := failure_of(tests[name]))}
    if failing:
        sys.exit(f"mutate: without a mutation these fail: {failing}")


def run_all(numbers: list[int]) -> tuple[list[dict], float]:
    begin = time.monotonic()
    copy_tree()
    set_up()
    tests = tests_of_build()
    for number in [number for number in numbers if MUTATIONS[number - 1].test not in tests]:
        print(f"not covered on this machine: mutation {number}, whose test {MUTATIONS[number - 1].test} is not built here")
    numbers = [number for number in numbers if MUTATIONS[number - 1].test in tests]
    wanted = sorted({MUTATIONS[number - 1].test for number in numbers})
    expect_passing(tests, wanted)
    print(f"built and tested without a mutation: {time.monotonic() - begin:.0f} s", flush=True)
    found = []
    for number in numbers:
        mutation, start = MUTATIONS[number - 1], time.monotonic()
        result = try_mutation(mutation, tests)
        found.append({"number": number, "kind": mutation.kind, "file": mutation.file, "old": mutation.old, "new": mutation.new, "test": mutation.test,
                      "result": result, "seconds": round(time.monotonic() - start, 1)})
        print(f"{number:3} {result:10} {found[-1]['seconds']:5.1f} s  {mutation.test}: {mutation.kind}, {mutation.file}", flush=True)
    expect_passing(tests, wanted)  # else what failed above did not fail by a mutation
    return found, time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("numbers", type=int, nargs="*", metavar="NUMBER")
    options = parser.parse_args()
    faults = faults_of_list(ROOT) + [f"there is no mutation {number}" for number in options.numbers if not 1 <= number <= len(MUTATIONS)]
    if faults or options.check:
        print("\n".join(faults), file=sys.stderr) if faults else print(f"mutations: each of {len(MUTATIONS)} old lines stands once")
        return bool(faults)
    found, seconds = run_all(options.numbers or list(range(1, len(MUTATIONS) + 1)))
    lost = [each for each in found if each["result"] == "escaped" or each["result"].startswith(NOT_COMPILED)]
    print(f"{len(found) - len(lost)} of {len(found)} caught in {seconds:.0f} s")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({
            "command": "scripts/mutate.py", "commit": said_by("git", "rev-parse", "--short=7", "HEAD"),
            "changed": bool(said_by("git", "status", "--porcelain", "-uno")), "date": datetime.date.today().isoformat(),
            "caught": len(found) - len(lost), "of": len(found), "seconds": round(seconds), "mutations": found}, indent=1) + "\n")
    return bool(lost) or not found


if __name__ == "__main__":
    sys.exit(main())
