"""fdm-checks: its command line; a run that has tried nothing fails and says so; FDM_CHECK_SEED moves seeds and shares."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import pytest

TESTS = pathlib.Path(__file__).resolve().parents[2] / "build/tests"
EMULATOR = TESTS / "emulator"
DEVICE = ("--emulate", "sm_90")
MASKS = ("topk", "interval", "dense", "slots", "key-bias")
SEED = ("--kernel", "cpu.forward.scalar", "--seed", "1000000", "--repeat", "1", "--rotate")


def run(*arguments, **settings):
    """The exit code of fdm-checks and what it said."""
    if not (TESTS / "fdm-checks").exists():
        pytest.skip("the tests are not built")
    if "--emulate" in arguments and not EMULATOR.exists():
        pytest.skip("there is no emulated device")
    environment = {k: v for k, v in os.environ.items() if k != "FDM_CHECK_SEED" and not k.startswith("EMULATED_")}
    environment |= {k: str(v) for k, v in settings.items()}
    done = subprocess.run([TESTS / "fdm-checks", *map(str, arguments)], capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--kernel", "cpu.forward.none", "--repeat", "1"], "WRONG no kernel of this run has such a name"),
        (["--emulate", "sm_90", "--kernel", "NO_SUCH_CODE", "--repeat", "1"], "WRONG no kernel accepted a problem; 1 were drawn"),
        (["--emulate", "sm_90", "--kernel", "NO_SUCH_CODE", "--repeat", "3"], "WRONG no kernel accepted a problem; 3 were drawn"),
        (["cases", "--kernel", "cpu.none"], "WRONG no case was run"),
        (["cases", "--group", "no such group"], "WRONG no case was run"),
        (["cases", "--kernel", "cpu.forward", "--group", "apart", "--share", "70/80"], "WRONG no case was run"),
        (["attention", "--kernel", "cpu.forward.scalar", "--repeat", "0"], "WRONG no kernel accepted a problem; 0 were drawn"),
        (["broken", "--group", "no such fault"], "0 passed, 0 failed"),
        *((["masks", mask, *DEVICE, "--repeat", "0"], "WRONG no case was run") for mask in MASKS),
        (["chain", *DEVICE, "--repeat", "0"], "WRONG no case was run"),
        (["placement", "--kernel", "cpu.none"], "0 ways, 0 wrong"),
        (["softmax", *DEVICE, "--kernel", "softmax.none"], "WRONG no kernel is named softmax.none"),
        (["softmax", *DEVICE, "--kernel", "softmax.naive", "--share", "7000/8000"], "WRONG softmax.naive took no problem of this run"),
        (["gemm", *DEVICE, "--kernel", "gemm.none"], "WRONG no kernel is named gemm.none"),
        (["gemm", *DEVICE, "--kernel", "gemm.naive", "--share", "69999/70000"], "WRONG gemm.naive took no problem of this run"),
    ],
)
def test_a_run_that_tries_nothing_fails(arguments, sentence):
    code, said = run(*arguments)
    assert code == 1
    assert sentence in said


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["mask"], 'fdm-checks: there is no subject "mask"; --help lists the subjects'),
        (["masks"], 'fdm-checks: there is no subject "masks"; --help lists the subjects'),
        (["merge", "--seed", "1"], "fdm-checks: merge takes no option --seed; it takes: emulate"),
        (["--sed", "1"], "fdm-checks: attention takes no option --sed; it takes: kernel"),
        (["merge", "--emulate"], "fdm-checks: --emulate is not given; allowed is NAME: "),
        (["--seed", "x"], "fdm-checks: --seed is x; allowed is N: "),
        (["--seed", "-1"], "fdm-checks: --seed is -1; allowed is N: "),
        (["--repeat=2k"], "fdm-checks: --repeat is 2k; allowed is N: "),
        (["--ways", "61+"], "fdm-checks: --ways is 61+; allowed is N[+M]: "),
        (["cases", "--share", "4/4"], "fdm-checks: --share is 4/4; allowed is K/N: "),
        (["--cuda=1"], "fdm-checks: --cuda is 1; allowed is no value: "),
        (["--seed", "1", "2"], "fdm-checks: 2 is no option: an option begins with --"),
    ],
)
def test_a_command_line_that_cannot_be_read_gets_one_sentence(arguments, sentence):
    code, said = run(*arguments)
    assert code == 2
    assert said.startswith(sentence) and said.count("\n") == 1


def test_help_lists_every_option_of_every_subject():
    code, said = run("masks", "topk", "--help")
    assert code == 0
    subjects, options = said.split("Options:")
    taken = {word for line in subjects.splitlines() if line.startswith(" " * 20) for word in line.split()}
    assert taken == set(re.findall(r"(?m)^  --(\S+)", options)) and "keys" in taken


@pytest.mark.parametrize("subject", [("merge",), ("chain",), ("softmax",), ("gemm",), *(("masks", mask) for mask in MASKS)])
def test_without_a_device_nothing_is_covered(subject):
    code, said = run(*subject, CUDA_VISIBLE_DEVICES="-1")
    assert code == 77
    assert said.startswith("not covered: ") and said.count("\n") == 1


def test_what_a_run_must_launch_and_did_not_is_a_fault():
    code, said = run("--kernel", "cpu.forward.scalar", "--repeat", "2", "--launches", "combine_splits")
    assert code == 1
    assert "WRONG combine_splits was not launched" in said


def seed_of(**settings):
    code, said = run(*SEED, **settings)
    assert code in (0, 1)  # some seeds are refused
    return int(re.search(r"--seed (\d+)", said).group(1))


def test_seeds_move_with_the_draw():
    first, again, second = seed_of(FDM_CHECK_SEED="495000"), seed_of(FDM_CHECK_SEED="495000"), seed_of(FDM_CHECK_SEED="495001")
    assert first == again != second
    assert all(1000000 < seed < 1900000 for seed in (first, second))
    assert seed_of() == 1000000


@pytest.mark.parametrize(
    "text, kernels",
    [
        ("mma.forward", ["mma.forward"]),
        ("mma.wide", ["mma.forward_d1024"]),
        ("mma.forward*", ["mma.forward", "mma.forward32", "mma.forward_d1024"]),
        ("mma.forward3", ["mma.forward32"]),
        ("hopper.backward", ["hopper.backward"]),
        ("hopper.back", ["hopper.backward", "hopper.backward_2pass"]),
    ],
)
def test_a_name_chooses_its_kernel_alone(text, kernels):
    _, said = run("--emulate", "sm_90", "--kernel", text, "--seed", "1", "--repeat", "0")
    assert sorted(re.findall(r"^(\w+\.\S+) +\d+ right", said, re.M)) == kernels


def test_a_name_chooses_its_cases_alone():
    words = ("cases", "--emulate", "sm_90", "--group", "softcap, two kernels", "--share", "0/1000", "--kernel")
    assert "WRONG no case was run" in run(*words, "hopper.backward")[1]
    assert run(*words, "hopper.wide")[1].endswith("1 passed, 0 failed\n")


def test_shares_and_ways_move_with_the_draw():
    def said_by(*arguments):
        texts = [run(*arguments, "--rotate", FDM_CHECK_SEED=text)[1] for text in ("a", "b", "c", "d")]
        return {re.search(r"without FDM_CHECK_SEED and --rotate: (.*)", text).group(1) for text in texts}

    assert len(said_by("cases", "--kernel", "cpu.decode", "--group", "apart", "--share", "0/7")) > 1
    assert len(said_by("attention", "--kernel", "cpu.decode.scalar", "--repeat", "1", "--ways", "61")) > 1
