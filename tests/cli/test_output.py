"""test_output.py: where the tool writes: through devices, FIFOs and links, whole files or none, and errors with reasons."""

import os
import resource
import shutil
import stat
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from test_cli import ENVIRONMENT, EXAMPLE, ROOT, TOOL, read_safetensors, run

WRITE = 3  # the exit code for what cannot be written
EVERY_COMMAND = ["--help", "--version", "info", "info --json", "plan", "plan --json", "plan --variants", "plan --help",
                 "plan --op gemm", "plan --op softmax --json", f"attend {EXAMPLE} --iters 1", f"attend {EXAMPLE} --iters 1 --json",
                 "attend --help", "mask blocks --mask MASK", "mask blocks --mask MASK --json", "mask --help", "bench --N 64 --iters 1",
                 "bench --N 64 --iters 1 --json", "bench --N 64 --iters 1 --csv", "bench --help", "cache", "cache --json",
                 "cache --help"]


@pytest.fixture
def writes(tmp_path):
    """The two commands that write files, without --out."""
    np.save(tmp_path / "mask.npy", np.ones((1, 1, 4, 4), bool))
    return {"attend": ["attend", ROOT / EXAMPLE, "--iters", 1], "mask": ["mask", "blocks", "--mask", tmp_path / "mask.npy"]}


@pytest.fixture
def open_folder():
    """A folder that every user may look into, for those who are not root."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def limited(*arguments, before, **environment):
    """A run in a process that has called `before`."""
    try:
        return subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True, cwd="/", timeout=120,
                              env=ENVIRONMENT | environment, preexec_fn=before)
    except PermissionError:
        pytest.skip("others than root may not run the tool where it lies")


def as_nobody():
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)


def assert_no_result(result, path, reason):
    assert result.returncode == WRITE and result.stdout == ""
    assert result.stderr == f"fdm: {path} cannot be written: {reason}\n"


# ---- standard output ----


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_a_full_device_as_standard_output(tmp_path, command):
    np.save(tmp_path / "mask.npy", np.ones((1, 1, 4, 4), bool))
    words = command.replace("MASK", str(tmp_path / "mask.npy")).split()
    with open("/dev/full", "w") as full:
        result = subprocess.run([TOOL, *words], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=120, env=ENVIRONMENT)
    assert result.returncode == WRITE
    assert result.stderr.startswith("fdm: standard output cannot be written") and result.stderr.count("\n") == 1


def test_the_reason_of_standard_output():
    with open("/dev/full", "w") as full:
        result = subprocess.run([TOOL, "plan"], stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert result.stderr == "fdm: standard output cannot be written: No space left on device\n"
    assert limited("info", before=lambda: os.close(1)).stderr == "fdm: standard output cannot be written: Bad file descriptor\n"


def test_an_error_before_keeps_its_exit_code():
    with open("/dev/full", "w") as full:
        result = subprocess.run([TOOL, "plan", "--batch", "x"], stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert result.returncode == 2 and result.stderr.count("\n") == 1


# ---- what is there stays what it is ----


@pytest.mark.parametrize("command", ["attend", "mask"])
def test_a_fifo_is_written_to(tmp_path, writes, command):
    fifo, file = tmp_path / "fifo", tmp_path / "file"
    os.mkfifo(fifo)
    read = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()), daemon=True)
    reader.start()
    result = run(*writes[command], "--out", fifo)
    reader.join(timeout=30)  # a tool that replaces the FIFO leaves it waiting
    assert result.returncode == 0, result.stderr
    assert stat.S_ISFIFO(fifo.lstat().st_mode)
    assert run(*writes[command], "--out", file).returncode == 0
    assert read == [file.read_bytes()] and len(read_safetensors(file)) > 0
    assert sorted(tmp_path.iterdir()) == [fifo, file, tmp_path / "mask.npy"]


def test_a_reader_that_leaves(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: fifo.open("rb").close(), daemon=True)
    reader.start()
    result = run("attend", EXAMPLE, "--iters", 1, "--backward", "--out", fifo)
    reader.join(timeout=30)  # a tool that replaces the FIFO leaves it waiting
    assert_no_result(result, fifo, "Broken pipe")


@pytest.mark.parametrize("command", ["attend", "mask"])
def test_devices_are_written_to(tmp_path, writes, command):
    """By links: a tool that replaces what it finds would replace the machine's devices."""
    full, null = tmp_path / "full", tmp_path / "null"
    full.symlink_to("/dev/full")
    null.symlink_to("/dev/null")
    assert_no_result(run(*writes[command], "--out", full), full, "No space left on device")
    assert run(*writes[command], "--out", null).returncode == 0
    assert full.is_symlink() and null.is_symlink()
    assert all(stat.S_ISCHR(path.stat().st_mode) for path in (full, null))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_node_stays_one(tmp_path, writes):
    node = tmp_path / "null"
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        node.open("wb").close()
    except PermissionError:
        pytest.skip("this machine lets nobody make devices that can be opened")
    assert run(*writes["attend"], "--out", node).returncode == 0
    assert stat.S_ISCHR(node.lstat().st_mode) and node.stat().st_rdev == os.makedev(1, 3)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "mask.npy", node]


@pytest.mark.parametrize("exists", [True, False])
def test_links_are_followed(tmp_path, writes, exists):
    (tmp_path / "far" / "folder").mkdir(parents=True)
    target, link, first = tmp_path / "far" / "folder" / "target", tmp_path / "far" / "link", tmp_path / "first"
    link.symlink_to("folder/target")
    first.symlink_to(link)
    if exists:
        target.write_text("old")
        target.chmod(0o640)
    assert run(*writes["attend"], "--out", first).returncode == 0
    assert first.is_symlink() and link.is_symlink() and not target.is_symlink()
    assert set(read_safetensors(target)) == {"out", "lse"}
    assert not exists or target.stat().st_mode & 0o777 == 0o640
    assert list(target.parent.iterdir()) == [target]


def test_permissions_of_a_new_file(tmp_path, writes):
    result = limited(*writes["mask"], "--out", tmp_path / "new", before=lambda: os.umask(0o027))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["out.safetensors.part", ".out.safetensors.part"])
def test_no_name_can_be_laid_in_wait(tmp_path, writes, name):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / name).symlink_to(victim)
    assert run(*writes["attend"], "--out", tmp_path / "out.safetensors").returncode == 0
    assert victim.read_text() == "precious" and (tmp_path / name).is_symlink()


# ---- errors come before the work, and leave nothing ----


@pytest.mark.parametrize("command", ["attend", "mask"])
@pytest.mark.parametrize("place, reason", [
    ("no/out", "No such file or directory"), ("file/out", "Not a directory"), ("folder", "Is a directory"), ("new/", "Is a directory"),
    ("socket", "No such device or address"), ("loop", "Too many levels of symbolic links"), ("x" * 300, "File name too long"),
    ("gone", "No such file or directory")])
def test_what_cannot_be_written_is_known_before_the_work(tmp_path, command, place, reason):
    import socket

    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("no/target")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        before = sorted(tmp_path.iterdir())
        words = [command, *(["blocks"] if command == "mask" else []), "no such input.safetensors"]
        assert_no_result(run(*words, "--out", f"{tmp_path}/{place}"), f"{tmp_path}/{place}", reason)
        assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "old"


def test_what_may_not_be_written_is_known_before_the_work(open_folder):
    (open_folder / "mine").mkdir(0o755)
    file = open_folder / "file"
    file.write_text("old")
    file.chmod(0o444)
    open_folder.chmod(0o777)
    result = limited("attend", "no such input.safetensors", "--out", file, before=as_nobody)
    assert_no_result(result, file, "Permission denied")
    if os.geteuid() != 0:
        (open_folder / "mine").chmod(0o555)
    result = limited("attend", "no such input.safetensors", "--out", open_folder / "mine" / "out", before=as_nobody)
    assert_no_result(result, open_folder / "mine" / "out", "Permission denied")
    assert file.read_text() == "old" and not list((open_folder / "mine").iterdir())


@pytest.mark.parametrize("exists", [True, False])
def test_a_full_disk_leaves_no_half_file(tmp_path, writes, exists):
    """The limit on a file's size stands in for the disk: its error comes in the middle of the file too."""
    out = tmp_path / "out"
    if exists:
        out.write_text("old")
    before = sorted(tmp_path.iterdir())
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))  # noqa: E731
    assert_no_result(limited(*writes["attend"], "--out", out, before=limit), out, "File too large")
    assert sorted(tmp_path.iterdir()) == before and (not exists or out.read_text() == "old")


def test_entries_that_cannot_be_removed(open_folder):
    entry = open_folder / "0.cubin"
    entry.write_text("")
    (open_folder / "1.cubin").mkdir()  # no entry
    if os.geteuid() != 0:
        open_folder.chmod(0o555)
    result = limited("cache", "clear", before=as_nobody, FLASH_DMATTN_CACHE_DIR=str(open_folder))
    open_folder.chmod(0o755)
    assert result.returncode == WRITE and result.stderr == f"fdm: {entry} cannot be removed: Permission denied\n"
    assert result.stdout == "0 entries, 0 bytes removed\n"
