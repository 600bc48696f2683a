"""test_input.py: tensors from pipes, in the other byte order, and from files larger than memory or that are no files."""

import io
import os
import resource
import socket
import subprocess
import threading
import time

import numpy as np
import pytest

from test_cli import ENVIRONMENT, HEADER, ROOT, TOOL, npy_of, run, safetensors_of, write_safetensors


@pytest.fixture
def qkv():
    generator = np.random.default_rng(7)
    return {name: generator.standard_normal((1, 300, 2, 32)).astype(np.float32) for name in "qkv"}


@pytest.fixture
def wanted(tmp_path, qkv):
    """What attention of q, k and v is: the bytes of the file."""
    write_safetensors(tmp_path / "in.safetensors", qkv)
    assert run("attend", tmp_path / "in.safetensors", "--out", tmp_path / "wanted.safetensors").returncode == 0
    return (tmp_path / "wanted.safetensors").read_bytes()


def npy_bytes(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def fifo_of(path, data, after=0.0):
    """A FIFO, and the thread that writes `data` to it once it is read."""
    def write():
        time.sleep(after)
        try:
            path.write_bytes(data)
        except BrokenPipeError:
            pass

    os.mkfifo(path)
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    return thread


def assert_refused(result, path, fault):
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith(f"fdm: {path}: ") and fault in result.stderr and result.stderr.count("\n") == 1


# ---- pipes ----


def test_a_fifo_without_a_writer_is_no_hang(tmp_path):
    os.mkfifo(tmp_path / "q.npy")
    began = time.monotonic()
    assert_refused(run("attend", "--q", tmp_path / "q.npy"), tmp_path / "q.npy", "nobody writes to this pipe")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("after", [0, 0.5])
def test_fifos_are_read(tmp_path, qkv, wanted, after):
    """Larger than a pipe's buffer; and one whose writer comes later than the tool."""
    arguments = []
    for name, array in qkv.items():
        assert array.nbytes > 1 << 16
        fifo_of(tmp_path / f"{name}.npy", npy_bytes(array), after if name == "q" else 0)
        arguments += [f"--{name}", tmp_path / f"{name}.npy"]
    result = run("attend", *arguments, "--out", tmp_path / "out.safetensors")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out.safetensors").read_bytes() == wanted


def test_a_slow_writer_is_waited_for(tmp_path, qkv, wanted):
    """Longer than for one that does not come at all."""
    command = ["bash", "-c", f'exec "$0" attend --out {tmp_path}/out.safetensors --q <(cat {tmp_path}/q.npy) '
               f"--k <(sleep 4; cat {tmp_path}/k.npy) --v {tmp_path}/v.npy", TOOL]
    for name, array in qkv.items():
        np.save(tmp_path / f"{name}.npy", array)
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out.safetensors").read_bytes() == wanted


@pytest.mark.parametrize("end", [b"", b"behind the last tensor"])
def test_safetensors_through_a_pipe(tmp_path, qkv, wanted, end):
    """In another order than the header's, with a gap."""
    data, entries = b"", {}
    for name in "vkq":
        data += b"gap"
        entries[name] = {"dtype": "F32", "shape": list(qkv[name].shape), "data_offsets": [len(data), len(data) + qkv[name].nbytes]}
        data += qkv[name].tobytes()
    whole = safetensors_of({name: entries[name] for name in "qkv"}, data + end)
    (tmp_path / "moved.safetensors").write_bytes(whole)
    fifo_of(tmp_path / "fifo", whole)
    for source in ("moved.safetensors", "fifo"):
        result = run("attend", tmp_path / source, "--out", tmp_path / "out.safetensors")
        assert result.returncode == 0, result.stderr
        assert (tmp_path / "out.safetensors").read_bytes() == wanted


ARRAY = npy_bytes(np.zeros((1, 2, 1, 2), np.float32))
DAMAGED_PIPES = {
    "short": (ARRAY[:-1], "it ends before tensor 'q' does"),
    "long": (ARRAY + b"x", "its shape does not match the bytes that follow the header"),
    "cut_header": (ARRAY[:40], "its header is longer than the file"),
    "cut_magic": (ARRAY[:5], "shorter than its header length"),
    "no_format": (b"a line of text, and more of it\n", "its header is longer than the file or 100 MiB"),
    "no_json": (HEADER.pack(4) + b"text", "an object is expected"),
    "tensor_cut": (safetensors_of({"q": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, bytes(35)), "it ends before"),
    "gap_cut": (safetensors_of({"q": {"dtype": "F32", "shape": [1], "data_offsets": [36, 40]}}, bytes(9)), "it ends before"),
    "length_of_exabytes": (HEADER.pack(2**63), "its header is longer than the file or 100 MiB"),
    "offsets_of_exabytes": (safetensors_of({"q": {"dtype": "F32", "shape": [1], "data_offsets": [2**63, 2**63 + 4]}}), "integer"),
}


@pytest.mark.parametrize("name", DAMAGED_PIPES)
def test_damaged_pipes(tmp_path, name):
    data, fault = DAMAGED_PIPES[name]
    fifo_of(tmp_path / "fifo", data)
    assert_refused(run("attend", "--q", tmp_path / "fifo"), tmp_path / "fifo", fault)


# ---- what is no file ----


def test_what_is_neither_file_nor_pipe(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s.npy"))
        assert_refused(run("attend", "--q", tmp_path / "s.npy"), tmp_path / "s.npy", "No such device or address")
    (tmp_path / "d.npy").mkdir()
    (tmp_path / "n.npy").symlink_to("/dev/zero")
    for name in ("d.npy", "n.npy"):
        assert_refused(run("attend", "--q", tmp_path / name), tmp_path / name, "it is neither a regular file nor a pipe")


# ---- the header comes first ----


def limited(*arguments):
    """With 2 GiB of memory, so that a tool that reads all of a file first does not take the machine's."""
    return subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=60, env=ENVIRONMENT,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)))


SHAPE = (1, 2**19, 2**10, 2**9)  # 2^40 bytes
LARGE = {
    "npy_dtype": ("q.npy", npy_of("{'descr': '<c8', 'fortran_order': False, 'shape': (1,)}", b""), "its dtype is '<c8'"),
    "npy_shape": ("q.npy", npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}", b""), "its shape does not match"),
    "npy_honest": ("q.npy", npy_of(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {SHAPE}}}", b""),
                   "tensor 'q' has 1099511627776 bytes, more than there is memory"),
    "header": ("q.safetensors", HEADER.pack(2**39), "its header is longer than the file or 100 MiB"),
    "dtype": ("q.safetensors", safetensors_of({"q": {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]}}, b""), "has dtype C64"),
    "honest": ("q.safetensors", safetensors_of({"q": {"dtype": "F32", "shape": SHAPE, "data_offsets": [0, 2**40]}}, b""),
               "tensor 'q' has 1099511627776 bytes, more than there is memory"),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_terabyte_is_not_read_before_its_header(tmp_path, name):
    place, start, fault = LARGE[name]
    with open(tmp_path / place, "wb") as file:
        file.write(start)
        file.truncate(len(start) + 2**40)
    assert_refused(limited("attend", "--q", tmp_path / place), tmp_path / place, fault)


@pytest.mark.parametrize("name", ["npy_honest", "honest"])
def test_a_terabyte_through_a_pipe(tmp_path, name):
    fifo_of(tmp_path / "q", LARGE[name][1])
    assert_refused(limited("attend", "--q", tmp_path / "q"), tmp_path / "q", LARGE[name][2])


# ---- the order of bytes ----


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_the_other_byte_order_gives_the_same_bits(tmp_path, qkv, dtype):
    bias = np.random.default_rng(8).standard_normal((1, 2, 1, 300)).astype(dtype)
    starts = np.zeros((1, 2, 300), np.int32)
    ends = np.full((1, 2, 300), 250, np.int32)
    ends[..., 7::3] = 300
    arrays = {name: array.astype(dtype) for name, array in qkv.items()}
    arrays |= {"bias": bias, "interval-start": starts, "interval-end": ends}
    results = []
    for order in "<>":
        arguments = []
        for name, array in arrays.items():
            path = tmp_path / f"{name}{'l' if order == '<' else 'b'}.npy"
            np.save(path, array.astype(array.dtype.newbyteorder(order)))
            assert order.encode() in path.read_bytes()[:40]
            arguments += [f"--{name}", path]
        result = run("attend", *arguments, "--check", "--iters", 1, "--out", tmp_path / "out.safetensors")
        assert result.returncode == 0, result.stderr
        results.append((tmp_path / "out.safetensors").read_bytes())
    assert results[0] == results[1]


def test_results_are_no_npy(tmp_path):
    result = run("attend", "examples/minilm/qkv.safetensors", "--out", tmp_path / "out.npy")
    assert result.returncode == 2 and "written as .safetensors, not as .npy" in result.stderr
    assert not list(tmp_path.iterdir())
