"""test_processes.py: threads, fork after use, and concurrent calls."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from flash_dmattn import _arguments, flash_dmattn_func

# Compared as bytes: PyTorch's own parallel operations hang in such a child (GCC PR 60035).
FORK = """
import multiprocessing, os, torch
from flash_dmattn import _arguments, flash_dmattn_func
_arguments.forced_family = os.environ.get("FDM_TEST_FAMILY")
torch.manual_seed(0)
torch.set_num_threads(2)
q, k, v = (torch.randn(2, 200, 4, 32, requires_grad=True) for _ in range(3))
dout = torch.randn(2, 200, 4, 32)

def attend():
    out = flash_dmattn_func(q, k, v, is_causal=True)
    return [each.detach().numpy().tobytes() for each in (out, *torch.autograd.grad(out, (q, k, v), dout))]

def child(before):
    assert attend() == before
    torch.set_num_threads(1)  # what docs/troubleshooting.md says makes the rest of PyTorch work
    assert torch.allclose(torch.autograd.grad(flash_dmattn_func(q, q, q), q, dout)[0].sum(), whole)

before = attend()
whole = torch.autograd.grad(flash_dmattn_func(q, q, q), q, dout)[0].sum()
worker = multiprocessing.get_context("fork").Process(target=child, args=(before,))
worker.start()
worker.join()
assert worker.exitcode == 0, worker.exitcode
assert attend() == before
"""

FORK_NUMPY = """
import os, numpy
from flash_dmattn import _arguments, attention, attention_backward
_arguments.forced_family = os.environ.get("FDM_TEST_FAMILY")
q, k, v, dout = numpy.random.default_rng(0).standard_normal((4, 2, 200, 4, 32), dtype="float32")

def attend():
    out, lse = attention(q, k, v, is_causal=True, return_lse=True)
    return [each.tobytes() for each in (out, *attention_backward(dout, q, k, v, out, lse, is_causal=True))]

before = attend()
child = os.fork()
if child == 0:
    os._exit(0 if attend() == before else 1)
assert os.waitpid(child, 0)[1] == 0
assert attend() == before
"""

# The parent used PyTorch's threads; the library is loaded by the child.
FORK_BEFORE_IMPORT = """
import os, torch
torch.set_num_threads(2)
torch.randn(1 << 20).exp_().sum()
q = torch.randn(2, 200, 4, 32)
child = os.fork()
if child == 0:
    from flash_dmattn import _arguments, flash_dmattn_func
    _arguments.forced_family = os.environ.get("FDM_TEST_FAMILY")
    before = flash_dmattn_func(q, q, q).numpy().tobytes()
    os._exit(0 if flash_dmattn_func(q, q, q).numpy().tobytes() == before else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.rotates(2)
@pytest.mark.parametrize("program", [FORK, FORK_NUMPY, FORK_BEFORE_IMPORT])
def test_fork_after_use(program):
    # A child that hangs goes with its parent's session.
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        assert process.wait(timeout=60) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


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
from flash_dmattn import _arguments, append_kv_cache, flash_dmattn_func, flash_dmattn_with_kvcache_func
_arguments.forced_family = os.environ.get("FDM_TEST_FAMILY")
torch.manual_seed(0)
q, k, v = (torch.randn(2, 5, 4, 8, requires_grad=True) for _ in range(3))
bias = torch.randn(2, 1, 1, 5, requires_grad=True)
mask = torch.rand(2, 4, 5, 5) < 0.7
out, lse = flash_dmattn_func(q, k.transpose(1, 2).contiguous().transpose(1, 2), v, mask, bias, return_lse=True)
(out.square().sum() + lse.clamp(max=9).sum()).backward()
rows, keys, values = (each.detach()[:, :2].clone() for each in (q, k, v))
lengths = torch.tensor([1, 3], dtype=torch.int32)
turn = dict(cache_seqlens=lengths, rotary=(torch.rand(9, 2), torch.rand(9, 2)))
caches = k.detach().clone(), v.detach().clone()
cached = flash_dmattn_with_kvcache_func(rows, *caches, keys, values, return_lse=True, **turn)
turned = append_kv_cache(*caches, keys, values, query=rows, **turn)
results = (out, q.grad, k.grad, v.grad, bias.grad, *caches, *cached, turned)
print(torch.cat([each.detach().double().flatten() for each in results]).tolist())
"""


@pytest.mark.rotates(2)
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
