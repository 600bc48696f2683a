"""fdm-compile --changed compiles what a change concerns, and nothing else."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

COMPILE = pathlib.Path(__file__).resolve().parents[2] / "build/tests/fdm-compile"


def counts(tmp_path, changed, *arguments):
    """Of how many specialisations that the changed files concern how many are compiled; the exit status."""
    if not COMPILE.exists():
        pytest.skip("the tests are not built")
    listed = tmp_path / "changed"
    listed.write_text("".join(path + "\n" for path in changed))
    done = subprocess.run([COMPILE, "--arch", "sm_90", "--changed", listed, *arguments], capture_output=True, text=True)
    return *map(int, re.match(r"(\d+) of (\d+) specialisations", done.stdout).groups()), done.returncode


def test_pages_and_tests_concern_nothing(tmp_path):
    assert counts(tmp_path, ["README.md", "tests/unit/test_rules.c", "src/problem/topk.c"]) == (0, 0, 0)


def test_a_kernel_concerns_itself(tmp_path):
    assert counts(tmp_path, ["src/gpu/merge.cu"])[:2] == (6, 6)


def test_a_text_concerns_those_who_include_it(tmp_path):
    compiled, concerned, _ = counts(tmp_path, ["src/families/hopper/hopper_softmax.cuh"], "--share", "0/100000")
    assert 0 < compiled < concerned
    assert counts(tmp_path, ["src/families/hopper/hopper_softmax.cuh"], "--entry", "mma_")[:2] == (0, 0)


def test_host_code_concerns_its_own_family(tmp_path):
    rules = ["src/families/mma/backward/mma_rules.c"]
    assert counts(tmp_path, rules, "--entry", "hopper")[:2] == (0, 0)
    assert counts(tmp_path, rules, "--entry", "mma_wide", "--share", "0/100000")[1] > 0
    assert counts(tmp_path, ["src/gpu/gpu_family.c"], "--entry", "hopper", "--share", "0/100000")[1] > 0


def test_when_the_time_ends_it_says_what_is_left(tmp_path):
    if not COMPILE.exists():
        pytest.skip("the tests are not built")
    done = subprocess.run([COMPILE, "--arch", "sm_90", "--entry", "mma_", "--seconds", "1"], capture_output=True, text=True)
    if "no NVRTC" in done.stdout:
        pytest.skip("there is no NVRTC")
    left, compiled = (int(re.search(pattern, done.stdout)[1]) for pattern in (r"ended before (\d+) of", r"(\d+) specialisations compiled"))
    listed = int(re.match(r"(\d+) of", done.stdout)[1])
    assert done.returncode == 0 and 0 < compiled < listed and left + compiled == listed
