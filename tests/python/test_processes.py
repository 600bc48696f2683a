"""test_processes.py: threads, fork after use, and concurrent calls."""

import subprocess
import sys
import threading

import pytest
import torch
from flash_dmattn import _arguments, flash_dmattn_func

FORK = """
import multiprocessing, os, torch
from flash_dmattn import _arguments, flash_dmattn_func
_arguments.forced_family = os.environ.get("FDM_TEST_FAMILY")
torch.manual_seed(0)
torch.set_num_threads(2)
q = torch.randn(2, 200, 4, 32)

def attend():
    # Compared as bytes: PyTorch's own parallel operations hang in a child (GCC PR 60035).
    return flash_dmattn_func(q, q, q, is_causal=True).numpy().tobytes()

def child(before):
    assert attend() == before

before = attend()
worker = multiprocessing.get_context("fork").Process(target=child, args=(before,))
worker.start()
worker.join()
assert worker.exitcode == 0, worker.exitcode
assert attend() == before
"""


def test_fork_after_use():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)


def test_concurrent_calls_agree():
    problems = [torch.randn(1, 50 + i, 4, 16) for i in range(8)]
    expected = [flash_dmattn_func(q, q, q, is_causal=True) for q in problems]
    wrong = []

    def work(index):
        for _ in range(20):
            q = problems[index].clone().requires_grad_()
            out = flash_dmattn_func(q, q, q, is_causal=True)
            out.sum().backward()
            if not torch.equal(out, expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_every_call_looks_at_the_environment(monkeypatch, capfd):
    monkeypatch.setattr(_arguments, "forced_family", None)
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    want = flash_dmattn_func(q, q, q)
    monkeypatch.setenv("FLASH_DMATTN_KERNEL", "no.such")
    with pytest.raises(ValueError, match="FLASH_DMATTN_KERNEL is 'no.such'; it must be the name of a kernel"):
        flash_dmattn_func(q, q, q)
    monkeypatch.setenv("FLASH_DMATTN_KERNEL", "")
    for name, value in {"NUM_THREADS": "abc", "CPU_ISA": "sse9", "LOG": "yes", "SCHEDULER": "xx"}.items():
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"FLASH_DMATTN_{name} is '{value}'; it must be "):
            patch.setenv(f"FLASH_DMATTN_{name}", value)
            flash_dmattn_func(q, q, q)
    assert torch.equal(flash_dmattn_func(q, q, q), want)
    monkeypatch.setattr(_arguments, "forced_family", "no family")
    with pytest.raises(ValueError, match="family 'no family' is unknown"):
        flash_dmattn_func(q, q, q)
    monkeypatch.setattr(_arguments, "forced_family", "cpu")
    flash_dmattn_func(q, q, q)
    monkeypatch.setenv("FLASH_DMATTN_LOG", "1")
    monkeypatch.setenv("FLASH_DMATTN_CPU_ISA", "scalar")
    flash_dmattn_func(q, q, q)
    assert "flash_dmattn: cpu.decode.scalar, " in capfd.readouterr().err


OLDER = """
import os, sys, torch
if sys.argv[1] == "table":
    del torch.Tensor.__dlpack_c_exchange_api__
else:
    del torch._C._dynamo.guards._empty_strided_cpu
from flash_dmattn import _arguments, flash_dmattn_func
_arguments.forced_family = os.environ.get("FDM_TEST_FAMILY")
torch.manual_seed(0)
q, k, v = (torch.randn(2, 5, 4, 8, requires_grad=True) for _ in range(3))
bias = torch.randn(2, 1, 1, 5, requires_grad=True)
mask = torch.rand(2, 4, 5, 5) < 0.7
out, lse = flash_dmattn_func(q, k.transpose(1, 2).contiguous().transpose(1, 2), v, mask, bias, return_lse=True)
(out.square().sum() + lse.clamp(max=9).sum()).backward()
print(torch.cat([each.detach().double().flatten() for each in (out, q.grad, k.grad, v.grad, bias.grad)]).tolist())
"""


def test_a_pytorch_without_the_quick_functions():
    def results(missing):
        command = [sys.executable, "-c", OLDER if missing else OLDER.replace("del torch", "torch"), missing or "table"]
        return subprocess.run(command, check=True, timeout=120, stdout=subprocess.PIPE).stdout

    assert results("table") == results("allocator") == results(None) != b""


def test_references_are_released():
    import gc
    import weakref

    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    count = sys.getrefcount(q)
    out = flash_dmattn_func(q, q, q)
    out.sum().backward()
    watch = weakref.ref(out)
    for _ in range(100):
        flash_dmattn_func(q, q, q)
    del out
    gc.collect()
    assert watch() is None
    assert sys.getrefcount(q) == count
