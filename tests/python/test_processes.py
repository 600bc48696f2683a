"""test_processes.py: threads, fork after use, and concurrent calls."""

import subprocess
import sys
import threading

import torch
from flash_dmattn import flash_dmattn_func

FORK = """
import os, torch
from flash_dmattn import _arguments, flash_dmattn_func
_arguments.forced_family = os.environ.get("FDM_TEST_FAMILY")
torch.manual_seed(0)
torch.set_num_threads(2)
q = torch.randn(2, 200, 4, 32)
before = flash_dmattn_func(q, q, q, is_causal=True)
child = os.fork()
if child == 0:
    # libgomp does not survive a fork by itself; one thread needs none of it.
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(before, flash_dmattn_func(q, q, q, is_causal=True)) else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert torch.equal(before, flash_dmattn_func(q, q, q, is_causal=True))
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
