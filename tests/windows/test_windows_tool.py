"""test_windows_tool.py: fdm.exe under wine, on files whose names have blanks and letters beyond ASCII.

FDM_TOOL names the program, and FDM_NVRTC the site-packages folder of a virtual environment with NVRTC's package for
Windows; scripts/wheels.py sets them. The tests see the folders as Linux has them, and wine shows their
owners and permissions to the tool as lists of who may do what.
"""

import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

TOOL = os.environ.get("FDM_TOOL", "")
WINE = shutil.which("wine")
pytestmark = pytest.mark.skipif(not TOOL.endswith(".exe") or not WINE, reason="FDM_TOOL names no .exe, or there is no wine")
ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "HOME", "WINEPREFIX", "WINEPATH") if name in os.environ}
ENVIRONMENT |= {"WINEDEBUG": "-all,err+msvcrt", "LC_ALL": "C.UTF-8"}  # what its C library refuses is said
SHAPE = (1, 24, 2, 32)


def run(*arguments, environment={}, **options):
    return subprocess.run([WINE, TOOL, *map(str, arguments)], capture_output=True, timeout=300,
                          env=ENVIRONMENT | environment, **options)


@pytest.fixture(scope="module", autouse=True)
def wine_stays():
    """Wine's own processes begin with its first one and end with its last. Their complaints are not the tool's."""
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": ENVIRONMENT}
    with subprocess.Popen([WINE, TOOL, "attend", "--q", "/dev/stdin"], stdin=subprocess.PIPE, **nowhere) as first:
        subprocess.run([WINE, TOOL, "--version"], timeout=300, **nowhere)
        yield
        first.stdin.close()


def assert_error(result, code, sentence):
    assert (result.returncode, result.stdout) == (code, b""), result
    assert result.stderr.decode() == f"fdm: {sentence}\n"


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "Maße und Größen" / "注意"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def qkv(place):
    draw = np.random.default_rng(5)
    arrays = {name: draw.standard_normal(SHAPE).astype(np.float32) for name in "qkv"}
    for name, array in arrays.items():
        np.save(place / f"{name}.npy", array)
    return arrays


def attention(q, k, v):
    q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3)


def tensors_of(data):
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    return {name: np.frombuffer(data[8 + length:][slice(*t["data_offsets"])], {"F32": "<f4", "I32": "<i4"}[t["dtype"]])
            .reshape(t["shape"]) for name, t in header.items()}


def words(place):
    return ["attend", *(word for name in "qkv" for word in (f"--{name}", place / f"{name}.npy"))]


# ---- what it does ----


def test_lines_end_as_they_are_written():
    result = run("info")
    assert result.returncode == 0 and result.stderr == b"" and b"\r" not in result.stdout
    assert b"reference.forward            available" in result.stdout and b"CUDA: " in result.stdout
    assert json.loads(run("plan", "--device", "sm_90", "--head-dim", 64, "--dtype", "bf16", "--json").stdout)["family"] == "hopper"


def test_attention_is_float64s(place, qkv):
    out = place / "Ergebnis für mich.safetensors"
    result = run(*words(place), "--check", "--iters", 1, "--out", out)
    assert result.returncode == 0, result.stderr
    tensors = tensors_of(out.read_bytes())
    assert set(tensors) == {"out", "lse"}
    np.testing.assert_allclose(tensors["out"], attention(**qkv), atol=2e-5)
    assert sorted(path.name for path in place.iterdir()) == sorted(["k.npy", "q.npy", "v.npy", out.name])


def test_a_file_is_replaced_and_keeps_its_permissions(place, qkv):
    out = place / "out.safetensors"
    out.write_text("old")
    out.chmod(0o600)
    assert run(*words(place), "--iters", 1, "--out", out).returncode == 0
    assert set(tensors_of(out.read_bytes())) == {"out", "lse"}
    assert out.stat().st_mode & 0o007 == 0  # of what the user may, wine lets the group do all
    new = place / "new.safetensors"
    assert run(*words(place), "--iters", 1, "--out", new).returncode == 0 and new.stat().st_mode & 0o004


def test_standard_streams_carry_bytes(place, qkv):
    """Those that end a text on Windows, or change in one: 1A, 0D 0A, 0A."""
    q = np.frombuffer(b"\x1a\r\n\n" * (qkv["q"].size), "<f4").reshape(SHAPE)
    stream = io.BytesIO()
    np.save(stream, q)
    arguments = words(place)
    arguments[arguments.index("--q") + 1] = "/dev/stdin"
    result = run(*arguments, "--iters", 1, "--out", place / "out.safetensors", input=stream.getvalue())
    assert result.returncode == 0, result.stderr
    written = (place / "out.safetensors").read_bytes()
    np.testing.assert_allclose(tensors_of(written)["out"], attention(q, qkv["k"], qkv["v"]), atol=2e-5)
    result = run(*arguments, "--iters", 1, "--out", "/dev/stdout", input=stream.getvalue())
    assert result.returncode == 0 and written in result.stdout
    assert run(*words(place), "--iters", 1, "--out", "NUL").returncode == 0 and not (place / "NUL").exists()


# ---- bad input ----


def test_files_that_cannot_be_read(place, qkv):
    missing = place / "nirgends.npy"
    assert_error(run("attend", "--q", missing), 2, f"{missing}: No such file or directory")
    (place / "q.npy").write_bytes((place / "q.npy").read_bytes()[:-1])
    assert_error(run(*words(place)), 2, f"{place / 'q.npy'}: its shape does not match the bytes that follow the header")
    (place / "folder.npy").mkdir()
    assert_error(run("attend", "--q", place / "folder.npy"), 2,
                 f"{place / 'folder.npy'}: it is neither a regular file nor a pipe")
    assert_error(run("cache", "build", "--device", "sm_90", "--set", missing), 2,
                 f"the set {missing} cannot be read: No such file or directory")


@pytest.mark.parametrize("name, reason", [("no/out", "No such file or directory"), ("folder", "Is a directory"),
                                          ("new/", "Is a directory")])
def test_what_cannot_be_written_is_known_before_the_work(place, name, reason):
    (place / "folder").mkdir()
    assert_error(run("attend", "nowhere.safetensors", "--out", f"{place}/{name}"), 3,
                 f"{place}/{name} cannot be written: {reason}")
    assert [path.name for path in place.iterdir()] == ["folder"]


def test_a_read_only_file_stays(place, qkv):
    out = place / "out.safetensors"
    out.write_text("old")
    out.chmod(0o444)
    result = run(*words(place), "--iters", 1, "--out", out)
    assert_error(result, 3, f"{out} cannot be written: Permission denied")
    assert out.read_text() == "old"


# ---- a tool that is ended ----


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_is_ended_leaves_no_part_of_a_file(place, how):
    """While it writes 1 GiB: the old file stays, and no other."""
    keys = 32768
    for name, value in (("start", 0), ("end", keys)):
        np.save(place / f"{name}.npy", np.full((1, 1, keys), value, np.int32))
    out = place / "out.safetensors"
    out.write_text("old")
    process = subprocess.Popen([WINE, TOOL, "mask", "dense", "--interval-start", place / "start.npy", "--interval-end",
                                place / "end.npy", "--out", out], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    seen = []
    while process.poll() is None and not seen:
        seen = [path for path in place.glob(".fdm-*") if path.stat().st_size > 0] if any(place.glob(".fdm-*")) else []
    process.send_signal(how)
    process.wait(timeout=60)  # of an interrupted process wine says 0
    assert seen
    for _ in range(100):  # wine's server closes its files a moment later
        if not any(place.glob(".fdm-*")):
            break
        time.sleep(0.1)
    assert sorted(path.name for path in place.iterdir()) == ["end.npy", "out.safetensors", "start.npy"]
    assert out.read_text() == "old"


# ---- the cache of kernels ----


@pytest.fixture
def cache(place):
    folder = place / "Cache"
    folder.mkdir(mode=0o700)
    (folder / "0.cubin").write_bytes(bytes(7))
    (folder / "0.cubin").chmod(0o600)
    return folder


def told(cache):
    result = run("cache", "--json", environment={"FLASH_DMATTN_CACHE_DIR": str(cache)})
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_cache_is_listed_and_cleared(cache):
    facts = told(cache)
    assert facts["entries"] == [{"name": "0.cubin", "bytes": 7}] and facts["ignored"] == 0
    assert facts["folder"] == str(cache)
    result = run("cache", "clear", environment={"FLASH_DMATTN_CACHE_DIR": str(cache)})
    assert result.stdout == b"1 entries, 7 bytes removed\n" and not any(cache.iterdir())
    result = run("cache", "pack", cache / "all.fdm", environment={"FLASH_DMATTN_CACHE_DIR": str(cache)})
    assert_error(result, 1, f"the cache folder {cache} has no compiled kernels")


def test_the_cache_lies_among_the_users_own_data():
    folder = json.loads(run("cache", "--json").stdout)["folder"]
    assert re.fullmatch(r"C:\\users\\.*\\Local/flash_dmattn/cache", folder)


@pytest.mark.parametrize("which", ["entry", "folder"])
def test_what_others_may_write_is_ignored(cache, which):
    path = cache / "0.cubin" if which == "entry" else cache
    path.chmod(0o777)
    facts = told(cache)
    assert facts["ignored"] == 1 and "is ignored: it may be written by others than its owner" in facts["why_ignored"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("which", ["entry", "folder"])
def test_what_others_own_is_ignored(cache, which):
    os.chown(cache / "0.cubin" if which == "entry" else cache, 65534, 65534)
    facts = told(cache)
    assert facts["ignored"] == 1 and "is ignored: it belongs to another user" in facts["why_ignored"]


def test_kernels_need_nvrtc(place):
    result = run("cache", "build", "--device", "sm_90", environment={"FLASH_DMATTN_CACHE_DIR": str(place / "new")})
    assert result.returncode == 1 and result.stdout == b""
    assert result.stderr.startswith(b"fdm: ") and b"NVRTC" in result.stderr and result.stderr.count(b"\n") == 1
    assert not (place / "new").exists()


SITE_PACKAGES = os.environ.get("FDM_NVRTC", "")


def in_wine(path):
    return "Z:" + str(path).replace("/", "\\")


@pytest.mark.skipif(not SITE_PACKAGES, reason="FDM_NVRTC names no folder with NVRTC for Windows")
@pytest.mark.parametrize("where", ["PYTHONPATH", "VIRTUAL_ENV", "CUDA_PATH"])
def test_a_kernel_is_compiled_by_nvrtc_for_windows(place, where):
    site = pathlib.Path(SITE_PACKAGES)
    folder = {"PYTHONPATH": site, "VIRTUAL_ENV": site.parent.parent, "CUDA_PATH": place / "toolkit"}[where]
    if where == "CUDA_PATH":
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "x64").symlink_to(site / "nvidia" / "cu13" / "bin" / "x86_64")
    problems = place / "problems.txt"
    problems.write_text("--head-dim 64 --seqlen-q 64 --seqlen-k 64 --dtype bf16 --causal\n")
    named = {"PYTHONPATH": in_wine(place), "FLASH_DMATTN_CACHE_DIR": in_wine(place / "kernels"), where: in_wine(folder)}
    result = run("cache", "build", "--device", "sm_80", "--set", problems, environment=named)
    assert result.returncode == 0, result.stderr
    assert [entry.read_bytes()[:8] for entry in (place / "kernels").iterdir()]
