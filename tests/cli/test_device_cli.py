"""test_device_cli.py: fdm attend and fdm bench on a CUDA device: the machine's own, else the emulated one of 9.0.

Outputs are compared with float64 by --check, which must also see one that is wrong. Times of the emulated device mean nothing.
"""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from test_cli import ENVIRONMENT, ROW, TOOL, read_safetensors, run, softmax_attention, write_safetensors

EMULATOR = Path(TOOL).parent / "tests" / "emulator"
OF_MACHINE = {name: value for name, value in os.environ.items() if name.startswith(("CUDA", "VIRTUAL", "PYTHON", "HOME", "XDG"))}
OF_MACHINE |= {"FLASH_DMATTN_CACHE_DIR": os.environ.get("FLASH_DMATTN_CACHE_DIR", "")}
OF_MACHINE |= {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
PATHS = [str(EMULATOR), *filter(None, [ENVIRONMENT.get("LD_LIBRARY_PATH")])]
EMULATED = {"LD_LIBRARY_PATH": ":".join(PATHS), "EMULATED_DEVICES": "sm_90", "EMULATED_CHECK": "0",
            "CUDA_VISIBLE_DEVICES": "0", "FLASH_DMATTN_CACHE_DIR": str(EMULATOR / "cache")}


def has_cuda(environment):
    facts = json.loads(run("info", "--json", **environment).stdout)
    return bool(facts["cuda"] and facts["compiler"])


DEVICE = OF_MACHINE if has_cuda(OF_MACHINE) else EMULATED
pytestmark = pytest.mark.skipif(DEVICE is EMULATED and not EMULATOR.exists(),
                                reason="no CUDA device, and this build has no emulated one")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Files by name: float16 tensors, with a mask or a bias of the rows' keys beside them, and scores beyond float16."""
    folder, generator = tmp_path_factory.mktemp("inputs"), np.random.default_rng(1)

    def normal(*shape):
        return generator.standard_normal(shape).astype(np.float16)

    half = {"q": normal(2, 150, 4, 64), "k": normal(2, 150, 2, 64), "v": normal(2, 150, 2, 64)}
    files = {"half": half,
             "mask": half | {"mask": normal(2, 1, 150, 150) > -1},
             "bias": half | {"bias": normal(1, 2, 1, 150)},
             "large": {name: normal(1, 128, 2, 64) * np.float16(60 if name in "qk" else 1) for name in "qkv"}}
    for name, tensors in files.items():
        write_safetensors(folder / f"{name}.safetensors", tensors)
    return {name: folder / f"{name}.safetensors" for name in files}


ATTEND = {
    "plain": ("half", ""),
    "causal": ("half", "--causal"),
    "window and softcap": ("half", "--window 40,3 --softcap 5"),
    "mask": ("mask", ""),
    "bias": ("bias", ""),
    "top-W": ("bias", "--causal --topk 24"),
    "top-W backward": ("bias", "--causal --topk 24 --backward"),
    "backward": ("half", "--causal --backward"),
    "a kernel": ("half", "--kernel mma.forward"),
    "a textbook kernel": ("half", "--kernel mma.split-q"),
    "a choice": ("half", "--kernel MMA_SplitQ_ShareQKV_S1_Pad"),
    "sums in float32": ("large", "--kernel MMA_SplitQ_S2_Swizzle"),
}


@pytest.mark.parametrize("name", ATTEND)
def test_attend(name, inputs):
    file, options = ATTEND[name]
    result = run("attend", inputs[file], "--device", "cuda", *options.split(), "--check", "--json", "--iters", 1, **DEVICE)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["forward"]["plan"]["family"] != "cpu" and not any(row["failed"] for row in facts["errors"].values())
    assert set(facts["errors"]) >= {"out", "lse"} | ({"dq", "dk", "dv"} if "--backward" in options else set())
    assert ("dbias" in facts["errors"]) == (name == "top-W backward")
    if "--kernel" in options:
        plan = facts["forward"]["plan"]
        assert options.split()[1] in (plan["kernel"], plan["choice"])


def test_attend_sees_sums_that_overflow_float16(inputs):
    result = run("attend", inputs["large"], "--device", "cuda", "--kernel", "MMA_SplitQ_S2_Swizzle_F16Acc", "--check",
                 "--iters", 1, **DEVICE)
    assert result.returncode == 1 and "fdm: out differs from float64 by inf of its row" in result.stderr
    assert re.search(r"out +max inf.* WRONG$", result.stdout, re.MULTILINE)


def test_attend_writes_what_the_definition_says(tmp_path):
    generator = np.random.default_rng(2)
    qkv = {name: generator.standard_normal((1, 40, 2, 8)).astype(np.float16) for name in "qkv"}
    write_safetensors(tmp_path / "in.safetensors", qkv)
    result = run("attend", tmp_path / "in.safetensors", "--device", "cuda:0", "--out", tmp_path / "out.safetensors", **DEVICE)
    assert result.returncode == 0, result.stderr
    assert np.abs(read_safetensors(tmp_path / "out.safetensors")["out"] - softmax_attention(**qkv)).max() < 2e-3


def test_attend_on_a_device_that_is_not_there(inputs):
    result = run("attend", inputs["half"], "--device", "cuda:99", **DEVICE)
    assert result.returncode == 2 and re.search(r"CUDA device index is 99; this machine has \d+$", result.stderr.strip())


def test_bench_rows_have_their_form():
    """The codes of one kernel, and beside a problem that it cannot take the reason."""
    arguments = "--device cuda --N 128 --iters 2 --show-all --check --kernel".split()
    result = run("bench", "attention", *arguments, "split-q+share-qkv", **DEVICE)
    assert result.returncode == 0, result.stderr
    rows, table = result.stdout.split("\n\n")
    assert all(ROW.fullmatch(row) for row in rows.splitlines()), rows
    assert len(rows.splitlines()) == len(table.splitlines()) - 1 == 8 and "mma(split-q+share-qkv+stage2): [" in rows
    firsts = [float(row.split("[")[1].split(",")[0]) for row in rows.splitlines()]
    assert max(firsts) - min(firsts) < 1e-2 and any(firsts)


@pytest.mark.parametrize("options", ["--N 100 --Nk 150 --D 128 --Dv 96 --dtype bf16 --kernel mma.forward",
                                     "--N 1 --Nk 512 --H 8 --Hkv 2 --D 128 --kernel mma.decode",
                                     "--N 200 --topk 20 --kernel mma.forward", "--N 96 --D 512 --kernel mma.forward_d1024",
                                     "--N 200 --causal --pass backward --kernel mma.backward"])
def test_bench_of_a_kernel(options):
    result = run("bench", "--device", "cuda", *options.split(), "--check", "--iters", 1, "--json", **DEVICE)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert rows and all(options.split("--kernel ")[1].split()[0] in row["kernel"] for row in rows)
