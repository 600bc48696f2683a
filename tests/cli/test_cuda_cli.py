"""test_cuda_cli.py: what the tool fdm says of CUDA devices and of a driver that fails, and how it uses one, on the pretended
driver, whose kernels do nothing.

The driver is build/tests/faults/libcuda.so.1 (tests/faults/fake_cuda.h says what its environment means).
"""

import json
import os
import re
import struct
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


def test_garbage_in_a_setting_is_no_reason_for_the_cpu(tmp_path):
    """The device is chosen automatically; its kernels would be looked for in the cache."""
    settings = {"FLASH_DMATTN_CACHE_DIR": str(tmp_path), "FLASH_DMATTN_CACHE_SIZE": "lots"}
    result = run("attend", EXAMPLE, "--iters", "1", **settings)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("fdm: FLASH_DMATTN_CACHE_SIZE is 'lots'; it must be ")


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
    assert result.returncode == 0 and json.loads(result.stdout)["family"] == "hopper"


# ---- attend and bench on a device ----


@pytest.fixture
def compiler(tmp_path):
    """The environment in which the pretended compiler is found, and what it makes is kept apart."""
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.13").symlink_to(DRIVER.parent / "libfake_nvrtc.so")
    return {"CUDA_HOME": str(tmp_path), "FLASH_DMATTN_CACHE_DIR": str(tmp_path / "cache")}


@pytest.fixture
def float16(tmp_path):
    """q, k and v [1, 24, 2, 16] in a .safetensors file; every element is 0.5."""
    data = struct.pack("<e", 0.5) * 768
    header = {name: {"dtype": "F16", "shape": [1, 24, 2, 16], "data_offsets": [n * 1536, (n + 1) * 1536]}
              for n, name in enumerate("qkv")}
    text = json.dumps(header).encode()
    path = tmp_path / "float16.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + 3 * data)
    return str(path)


def test_attend_sees_that_a_kernel_wrote_nothing(compiler, float16):
    """Outputs start as NaN on the device, too, and come back from there."""
    result = run("attend", float16, "--device", "cuda", "--check", **compiler)
    assert result.returncode == 1 and result.stderr == "fdm: out differs from float64 by inf of its row\n"
    assert result.stdout.startswith("device    cuda:0, sm_90\n")
    assert "\nforward   hopper.forward, choice SM90_Wgmma_" in result.stdout and "threads" not in result.stdout
    result = run("attend", float16, "--device", "cuda", "--json", **compiler)
    plan = json.loads(result.stdout)["forward"]["plan"]
    assert result.returncode == 0 and (plan["family"], plan["device.type"]) == ("hopper", 2)
    result = run("attend", float16, "--device", "cuda", "--check", FAKE_CUDA_DEVICES="8.9:101376", **compiler)
    assert result.returncode == 1 and "\nforward   mma.forward, choice MMA_Forward_" in result.stdout


def test_attend_chooses_the_device_by_itself(compiler, float16):
    def device(*arguments):
        result = run("attend", *arguments, "--iters", "1", "--json", **compiler)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)["device"].split(":")[0]

    assert device(float16) == device(float16, "--device", "auto") == device(float16, "--device", "cuda:0") == "sm_90"
    assert device(float16, "--device", "cpu") == device(float16, "--family", "reference") == "cpu"
    result = run("attend", float16, "--family", "reference", **compiler)
    assert result.stdout.startswith("device    cpu, since on cuda:0 no kernel takes this problem on sm_90: ")


def test_attend_refuses_what_the_device_cannot(compiler, float16):
    for arguments, code, words in [
        (["--device", "cuda:1"], 2, "CUDA device index is 1; this machine has 1"),
        (["--device", "cuda", "--family", "cpu"], 1, "it runs on CPUs only"),
        (["--device", "cuda", "--kernel", "mma.forward32"], 1, "it takes float32"),
    ]:
        result = run("attend", float16, *arguments, **compiler)
        assert result.returncode == code and result.stdout == "" and words in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("fault", ["cuMemAlloc:2:2", "cuMemcpyHtoD:1:1", "cuMemcpyDtoH:1:1", "cuMemsetD8:1:1",
                                   "cuEventCreate:2:2", "cuEventRecord:1:3", "cuEventElapsedTime:1:2",
                                   "cuLaunchKernelEx:1:3", "cuModuleLoadData:300:1",
                                   "cuEventSynchronize:700:1"])
@pytest.mark.parametrize("command", ["attend", "bench"])
def test_failing_calls_of_the_driver_end_the_command(compiler, float16, command, fault):
    what = [float16] if command == "attend" else ["--N", "64", "--kernel", "mma.forward"]
    result = run(command, *what, "--device", "cuda", FAKE_CUDA_FAIL=fault, **compiler)
    assert result.returncode == 1 and result.stderr.count("\n") == 1, result
    assert "failed: " in result.stderr and "no kernel" not in result.stderr
    if "cuEventSynchronize" in fault:
        assert result.stderr.startswith("fdm: waiting for a CUDA event failed: "), "the first failure, of all that follow"


def rows_of(result):
    """Names of the rows, without the family mma's."""
    rows = [re.match(r"(\w+\(.*\)): \[", row).group(1) for row in result.stdout.split("\n\n")[0].splitlines()]
    return [re.sub(r"^mma\((.*)\)$", r"\1", row) for row in rows]


def test_bench_shows_every_variant(compiler):
    shape = ["--device", "cuda", "--N", "320", "--iters", "1"]
    one = "split-q+share-qkv"
    result = run("bench", *shape, "--kernel", f"mma.{one}", "--show-all", **compiler)
    assert result.returncode == 0, result.stderr
    layouts = [f"{one}+stage{stages}{layout}" for stages in (1, 2) for layout in ("", "+swizzle")]
    assert sorted(rows_of(result)) == sorted(layouts + [f"{layout}+f16acc" for layout in layouts])
    assert rows_of(result)[0] == f"{one}+stage2+swizzle"
    assert rows_of(run("bench", *shape, "--kernel", f"mma.{one}", **compiler)) == [f"{one}+stage2+swizzle"]
    result = run("bench", *shape, "--kernel", "MMA_SplitQ_ShareQKV_S1_Pad", "--dtype", "bf16", "--json", **compiler)
    assert [row["row"] for row in json.loads(result.stdout)] == [f"mma({one}+stage1)"]
    textbook = {"split-q", "split-q+share-kv", one, "split-q+tiling-qk", "split-q+tiling-qkv"}
    for text, kernels in [("mma.split-q", {"split-q"}), ("mma.split-q*", textbook), ("mma.split-q+", textbook - {"split-q"}),
                          ("mma.wide", {"forward_d1024"}), ("MMA_SplitQ_Share*_Pad", {"split-q+share-kv", one})]:
        result = run("bench", *shape, "--kernel", text, "--json", "--show-all", **compiler)
        assert {row["kernel"].removeprefix("mma.") for row in json.loads(result.stdout)} == kernels, text
    result = run("bench", *shape, "--show-all", **compiler)
    kernels = {name.split("+stage")[0].split("+")[0] for name in rows_of(result)}
    assert kernels == {"hopper(forward", "forward", "forward_d1024", "split-kv", "split-q"}
    reason = "query rows times the heads of a group are at most 256"
    left_out = result.stdout.partition("\n\nleft out\n")[2]
    assert "  hopper(gather): " in left_out and f"\n  mma(decode): {reason}\n" in left_out
    assert result.stdout.endswith("\n  mma(forward32): it takes float32\n")


def test_bench_sees_that_a_kernel_wrote_nothing(compiler):
    for length in ("64", "4000"):  # of the longer one, some rows are looked at
        result = run("bench", "--device", "cuda", "--N", length, "--H", "1", "--kernel", "forward", "--check", **compiler)
        assert result.returncode == 1 and result.stderr == "fdm: a kernel differs from float64\n"


def test_bench_chooses_device_and_dtype(compiler):
    def device(*arguments):
        result = run("bench", "--N", "64", "--iters", "1", *arguments, "--json", **compiler)
        assert result.returncode == 0, result.stderr
        return {(row["kernel"].split(".")[0], row["device"].split(":")[0]) for row in json.loads(result.stdout)}

    assert device() == device("--dtype", "bf16") == {("hopper", "sm_90"), ("mma", "sm_90")}
    assert device("--topk", "9") == {("hopper", "sm_90"), ("mma", "sm_90")}
    assert device("--pass", "backward") == {("hopper", "sm_90"), ("mma", "sm_90")}
    assert device("--pass", "backward", "--dtype", "fp64", "--reference") == {("reference", "cpu")}
    assert device("--dtype", "fp64", "--reference") == {("reference", "cpu")}
    assert device("--kernel", "cpu.forward") == device("--device", "cpu") == {("cpu", "cpu")}
    assert device("--kernel", "MMA_SplitQ_S2_Pad") == {("mma", "sm_90")}


def test_plan_lists_what_its_kernels_take(compiler):
    command = ("plan", "--device", "sm_90", "--dtype", "bf16", "--seqlen-q", "1", "--seqlen-k", "4096", "--resources")
    result = run(*command, **compiler)
    assert result.returncode == 0 and result.stderr == ""
    # the pretended compiler says 40 registers and 24 bytes: 1280 a warp, 12 warps in a quarter
    assert result.stdout.splitlines()[-1] == (
        "  combine_splits: 128 threads of 40 registers, 24 bytes spill, 0 bytes shared; 12 blocks resident, 48 of 64 warps "
        "(75 %), bound by registers")
    plan = json.loads(run(*command, "--json", **compiler).stdout)
    decode, combine = plan["resources"]
    assert combine == {"entry": "combine_splits", "threads": 128, "registers": 40, "spill_bytes": 24, "shared_bytes": 0,
                       "blocks_per_sm": 12, "warps_per_sm": 48, "max_warps": 64, "bound": "registers"}
    assert decode["entry"] == "mma_decode" and decode["shared_bytes"] == plan["shared_bytes"]
    without = json.loads(run(*command[:-1], "--json", **compiler).stdout)
    assert "resources" not in without and without["choice"] == plan["choice"]
    failed = run(*command, FAKE_NVRTC_FAIL="nvrtcCompileProgram:6:1", **compiler | {"FLASH_DMATTN_CACHE_DIR": "/nowhere"})
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.count("\n") == 1 and "NVRTC does not compile families/mma/decode/mma_decode.cu for sm_90" in failed.stderr


def test_bench_says_what_the_device_lacks(compiler):
    for arguments, words in [
        (["--pass", "backward", "--D", "512", "--kernel", "hopper"], "no kernel took the problem; the first one, hopper.backward: "),
        (["--dtype", "fp64"], "float64 is computed by the reference family only, on the CPU"),
        (["--dtype", "bf16", "--kernel", "S2_Pad_F16Acc"], "has 'S2_Pad_F16Acc' in its name or choice code"),
    ]:
        result = run("bench", "--device", "cuda", *arguments, **compiler)
        assert result.returncode == 1 and result.stdout == "" and words in result.stderr
        assert result.stderr.count("\n") == 1
