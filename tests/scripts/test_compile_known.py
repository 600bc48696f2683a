"""fdm-checks compile --known compiles what is not recorded with the same text, constants and compiler, and nothing else."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

CHECKS = pathlib.Path(__file__).resolve().parents[2] / "build/tests/fdm-checks"
COMPILE = (CHECKS, "compile")


def listed(*arguments):
    """Lines of --list: architecture, entry, how many, key."""
    if not CHECKS.exists():
        pytest.skip("the tests are not built")
    done = subprocess.run([*COMPILE, "--list", *arguments], capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


def counts(tmp_path, lines):
    """Of how many specialisations of 9.0 how many are compiled beside what `lines` say is known; of each entry at most one."""
    known = tmp_path / "known"
    known.write_text("".join(" ".join(line) + "\n" for line in lines))
    done = subprocess.run([*COMPILE, "--arch", "sm_90", "--known", known, "--entry", "merge", "--seconds", "1"], capture_output=True, text=True)
    return *map(int, re.match(r"(\d+) of (\d+) specialisations", done.stdout).groups()), done.returncode


def test_what_is_known_is_left_out(tmp_path):
    lines = listed("--arch", "sm_90", "--entry", "merge")
    assert counts(tmp_path, lines) == (0, sum(int(count) for _, _, count, _ in lines), 0)


def test_another_key_or_architecture_is_not_known(tmp_path):
    ((_, entry, count, key),) = listed("--arch", "sm_90", "--entry", "merge")
    assert counts(tmp_path, [["sm_90", entry, count, f"{int(key, 16) ^ 1:016x}"], ["sm_80", entry, count, key]])[0] == int(count)


def test_a_key_holds_for_one_group_whatever_is_listed_beside_it():
    alone = listed("--arch", "sm_90", "--entry", "merge")
    assert alone[0] in listed("--arch", "sm_90")
    keys = [key for *_, key in listed()]
    assert len(keys) == len(set(keys)) > 100


def test_what_cannot_be_read_is_said(tmp_path):
    if not CHECKS.exists():
        pytest.skip("the tests are not built")
    done = subprocess.run([*COMPILE, "--arch", "sm_90", "--known", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and "cannot be read" in done.stderr


def test_when_the_time_ends_it_says_what_is_left(tmp_path):
    if not CHECKS.exists():
        pytest.skip("the tests are not built")
    done = subprocess.run([*COMPILE, "--arch", "sm_90", "--entry", "mma_", "--seconds", "1"], capture_output=True, text=True)
    if "no NVRTC" in done.stdout:
        pytest.skip("there is no NVRTC")
    left, compiled = (int(re.search(pattern, done.stdout)[1]) for pattern in (r"ended before (\d+) of", r"(\d+) specialisations compiled"))
    listed = int(re.match(r"(\d+) of", done.stdout)[1])
    assert done.returncode == 0 and 0 < compiled < listed and left + compiled == listed
