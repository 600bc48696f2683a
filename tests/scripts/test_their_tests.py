"""test_their_tests.py: which cells scripts/their_tests.py runs of a suite, in which order, and what it counts."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("flash_dmattn")
pytest.importorskip("torch")

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "their_tests.py"
# A suite of our own in the place of theirs.
CELLS = '''
import pytest
import torch
from flash_attn_interface import flash_attn_func
from helper import NUMBER


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("seqlen", [1, 2, 3, 4, 5, 512])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_output(seqlen, causal, dtype):
    if seqlen == 2:
        pytest.skip("their own")
    q = torch.randn(1, seqlen, 2, 16, device="cuda", dtype=dtype)
    assert q.device.type == "cpu" and NUMBER == 7
    assert flash_attn_func(q, q, q, causal=causal).shape == q.shape
    assert seqlen != 5, "a fault of the tests' own"


@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", range(1000))
def test_flash3_bw_compatibility(a, b):
    raise AssertionError("left out")
'''


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "hopper").mkdir()
    (tmp_path / "hopper" / "__init__.py").touch()
    (tmp_path / "hopper" / "helper.py").write_text("NUMBER = 7\n")
    (tmp_path / "hopper" / "test_flash_attn.py").write_text(CELLS)
    return tmp_path


def run(checkout, *arguments, suite="fa3"):
    file = checkout / "counts.json"
    command = [sys.executable, str(SCRIPT), "--suite", suite, "--path", str(checkout), "--device", "cpu", "--json", str(file)]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    )
    return done, json.loads(file.read_text()) if file.exists() else None


def test_counts(checkout):
    done, counts = run(checkout, "--largest", "256", "--commit", "abc")
    assert done.returncode == 1, done.stderr
    assert counts["left_out"] == {"schemas of torch.ops.flash_attn_3": 2000, "fp8": 12, "sequences of more than 256": 2}
    assert (counts["collected"], counts["remaining"], counts["commit"]) == (2024, 10, "abc")
    assert (counts["passed"], counts["failed"], counts["ran"], counts["skipped_by_suite"]) == (6, 2, 8, 2)
    assert counts["by_test"] == {"test_flash_attn_output": 8} and counts["ended_by"] == "all cells"
    assert all("5" in each["cell"] and "own" in each["error"] for each in counts["failures"])


def test_so_many_cells_and_parts(checkout):
    """Skipped cells do not count; parts share all of them."""
    _, counts = run(checkout, "--largest", "4", "--cells", "3")
    assert (counts["ran"], counts["ended_by"]) == (3, "cells")
    parts = [run(checkout, "--largest", "4", "--part", f"{part}/2") for part in (1, 2)]
    assert all(done.returncode == 0 for done, _ in parts)
    assert sum(counts["ran"] for _, counts in parts) == 6 and sum(counts["remaining"] for _, counts in parts) == 8


LARGE = """
import pytest


@pytest.mark.parametrize("a", range(100))
@pytest.mark.parametrize("b,c", [(n, n + 1) for n in range(100)])
def test_flash_attn_kvcache(a, b, c):
    assert 0 <= a < 100 and c == b + 1
"""


def test_cells_of_a_large_test_are_drawn(checkout):
    (checkout / "hopper" / "test_flash_attn.py").write_text(LARGE + CELLS)
    done, counts = run(checkout, "--tests", "kvcache", "--cells", "5", "--draw", "50")
    assert done.returncode == 0, done.stderr
    assert counts["collected"] == 10000 and counts["remaining"] == 50 and counts["passed"] == 5
    assert list(counts["left_out"].values()) == [9950]


FULL = """
import pytest
import torch

seen = []


@pytest.mark.parametrize("a", [1, 2])
def test_flash_attn_output(a):
    seen.append(a)
    if seen.count(a) < 3:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 70.00 GiB.")
    assert a == 1
"""


def test_cells_run_again_when_memory_was_lacking_and_when_they_failed(checkout):
    (checkout / "hopper" / "test_flash_attn.py").write_text(FULL)
    _, counts = run(checkout, "--wait", "0")
    assert (counts["passed"], counts["failed"]) == (1, 1) and "assert 2 == 1" in counts["failures"][0]["error"]
    (checkout / "counts.json").rename(checkout / "before.json")
    _, counts = run(checkout, "--wait", "0", "--again", str(checkout / "before.json"))
    assert (counts["ran"], counts["failed"]) == (1, 1)


def test_what_is_refused(checkout):
    for arguments, suite, sentence in (
        (("--part", "3/2"), "fa3", "'3/2' is not a part such as 2/4"),
        ((), "fa2", "has no tests/test_flash_attn.py"),
    ):
        done, _ = run(checkout, *arguments, suite=suite)
        assert done.returncode == 2 and sentence in done.stderr
