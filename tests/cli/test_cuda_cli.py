"""test_cuda_cli.py: what the tool fdm says of CUDA devices and of a driver that fails, on the pretended driver.

The driver is build/tests/faults/libcuda.so.1 (tests/faults/fake_cuda.h says what its environment means).
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = Path(os.environ.get("FDM_TOOL", ROOT / "build" / "fdm"))
DRIVER = TOOL.parent / "tests" / "faults" / "libcuda.so.1"
EXAMPLE = "examples/minilm/qkv.safetensors"

pytestmark = pytest.mark.skipif(not DRIVER.exists(), reason=f"{DRIVER} is not built: needs cmocka")


def run(*arguments, **environment):
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(DRIVER.parent)} | environment
    return subprocess.run([TOOL, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)


def cuda_lines(**environment):
    result = run("info", **environment)
    assert result.returncode == 0 and result.stderr == ""
    return [line for line in result.stdout.splitlines() if line.startswith("CUDA: ")]


def available(**environment):
    kernels = json.loads(run("info", "--json", **environment).stdout)["kernels"]
    return {kernel["name"]: kernel["available"] for kernel in kernels}


def test_info_lists_the_devices():
    devices = "9.0:232448,12.0:101376"
    lines = cuda_lines(FAKE_CUDA_DEVICES=devices)
    assert lines == [f"CUDA: device {index} is {name}, 132 multiprocessors, {kilobytes} KiB of shared memory a block, "
                     "L2 51200 KiB" for index, name, kilobytes in ((0, "sm_90", 227), (1, "sm_120", 99))]
    listed = json.loads(run("info", "--json", FAKE_CUDA_DEVICES=devices).stdout)["cuda"]
    assert [(device["name"], device["shared_bytes"]) for device in listed] == [("sm_90", 232448), ("sm_120", 101376)]
    assert available()["mma.forward"]


@pytest.mark.parametrize(("environment", "words"), [
    ({"LD_LIBRARY_PATH": str(ROOT)}, "no CUDA driver can be opened: libcuda.so.1"),
    ({"FAKE_CUDA_VERSION": "11040"}, "the CUDA driver is for CUDA 11.4; 12.0 or later is needed"),
    ({"FAKE_CUDA_LACKS": "19"}, "the CUDA driver has no cuLaunchKernelEx: it is older than 12.0"),
    ({"FAKE_CUDA_DEVICES": ""}, "the CUDA driver does not start: no CUDA-capable device is detected"),
    ({"FAKE_CUDA_FAIL": "cuInit:999:1"}, "the CUDA driver does not start: unknown error 999"),
    ({"FAKE_CUDA_FAIL": "cuDeviceGetAttribute:2:3"}, "asking for the CUDA device's attributes failed: out of memory"),
])
def test_info_says_why_there_is_no_device(environment, words):
    lines = cuda_lines(**environment)
    assert len(lines) == 1 and lines[0].startswith(f"CUDA: {words}")
    if "cuDeviceGetAttribute" not in environment.get("FAKE_CUDA_FAIL", ""):
        assert not available(**environment)["mma.forward"]


def test_info_says_which_device_does_not_answer():
    lines = cuda_lines(FAKE_CUDA_DEVICES="9.0:232448,9.0:232448", FAKE_CUDA_FAIL="cuDeviceGetAttribute:999:12")
    assert len(lines) == 2 and lines[0].startswith("CUDA: device 0 is sm_90")
    assert lines[1].startswith("CUDA: asking for the CUDA device's attributes failed: unknown error 999")


@pytest.mark.parametrize("environment", [{"FAKE_CUDA_FAIL": "cuInit:3:1"}, {"FAKE_CUDA_DEVICES": "7.5:65536"}, {}])
def test_the_cpu_does_not_mind(environment):
    result = run("attend", EXAMPLE, "--causal", "--topk", "64", "--backward", "--check", "--iters", "1", **environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    result = run("plan", "--device", "sm_90", "--dtype", "bf16", "--json", **environment)
    assert result.returncode == 0 and json.loads(result.stdout)["family"] == "mma"
