"""The programs of tests/checks: a run that has tried nothing fails and says so; FDM_CHECK_SEED moves seeds and shares."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import pytest

TESTS = pathlib.Path(__file__).resolve().parents[2] / "build/tests"
EMULATOR = TESTS / "emulator"
SEED = ("--kernel", "cpu.forward.scalar", "--seed", "1000000", "--repeat", "1", "--rotate")


def run(program, *arguments, **settings):
    """The exit code of a program of the build folder and what it said, on an emulated device where it needs one."""
    if not (TESTS / program).exists():
        pytest.skip("the tests are not built")
    environment = {k: v for k, v in os.environ.items() if k != "FDM_CHECK_SEED" and not k.startswith("EMULATED_")}
    if not program.startswith("fdm-checks"):
        if not (EMULATOR / "libcuda.so.1").exists():
            pytest.skip("there is no emulated device")
        settings |= {"LD_LIBRARY_PATH": EMULATOR, "EMULATED_DEVICES": "sm_90", "FLASH_DMATTN_CACHE_DIR": EMULATOR / "cache"}
    environment |= {k: str(v) for k, v in settings.items()}
    done = subprocess.run([TESTS / program, *map(str, arguments)], capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--kernel", "cpu.forward.none", "--repeat", "1"], "WRONG no kernel of this run has such a name"),
        (["--emulate", "sm_90", "--kernel", "NO_SUCH_CODE", "--repeat", "1"], "WRONG no kernel accepted a problem; 1 were drawn"),
        (["--emulate", "sm_90", "--kernel", "NO_SUCH_CODE", "--repeat", "3"], "WRONG no kernel accepted a problem; 3 were drawn"),
        (["--cases", "--kernel", "cpu.none"], "WRONG no case was run"),
        (["--cases", "--group", "no such group"], "WRONG no case was run"),
        (["--cases", "--kernel", "cpu.forward", "--group", "apart", "--share", "70/80"], "WRONG no case was run"),
    ],
)
def test_a_run_that_tries_nothing_fails(arguments, sentence):
    if "--emulate" in arguments and not EMULATOR.exists():
        pytest.skip("there is no emulated device")
    code, said = run("fdm-checks", *arguments)
    assert code == 1
    assert sentence in said


@pytest.mark.parametrize(
    "program, arguments, sentence",
    [
        ("topk-check", [0], "WRONG no case was run"),
        ("interval-check", [0], "WRONG no case was run"),
        ("dense-check", [0], "WRONG no case was run"),
        ("slots-check", [0], "WRONG no case was run"),
        ("key-bias-check", [0], "WRONG no case was run"),
        ("chain-check", [0], "WRONG no case was run"),
        ("softmax-check", ["softmax.none"], "WRONG no kernel is named softmax.none"),
        ("softmax-check", ["softmax.naive", "--share", "7000/8000"], "WRONG softmax.naive took no problem of this run"),
        ("gemm-check", ["gemm.none"], "WRONG no kernel is named gemm.none"),
    ],
)
def test_so_does_one_of_the_other_checks(program, arguments, sentence):
    code, said = run(program, *arguments)
    assert code == 1
    assert sentence in said


def test_what_a_run_must_launch_and_did_not_is_a_fault():
    code, said = run("fdm-checks", "--kernel", "cpu.forward.scalar", "--repeat", "2", "--launches", "combine_splits")
    assert code == 1
    assert "WRONG combine_splits was not launched" in said


def seed_of(**settings):
    code, said = run("fdm-checks", *SEED, **settings)
    assert code in (0, 1)  # some seeds are refused
    return int(re.search(r"--seed (\d+)", said).group(1))


def test_seeds_move_with_the_commit():
    first, again, second = seed_of(FDM_CHECK_SEED="d0278b3"), seed_of(FDM_CHECK_SEED="d0278b3"), seed_of(FDM_CHECK_SEED="bdf6849")
    assert first == again != second
    assert all(1000000 < seed < 1900000 for seed in (first, second))
    assert seed_of() == 1000000


def test_shares_and_ways_move_with_the_commit():
    def said_by(*arguments):
        texts = [run("fdm-checks", *arguments, "--rotate", FDM_CHECK_SEED=commit)[1] for commit in ("a", "b", "c", "d")]
        return {re.search(r"without FDM_CHECK_SEED and --rotate: (.*)", text).group(1) for text in texts}

    assert len(said_by("--cases", "--kernel", "cpu.decode", "--group", "apart", "--share", "0/7")) > 1
    assert len(said_by("--kernel", "cpu.decode.scalar", "--repeat", "1", "--ways", "61")) > 1
