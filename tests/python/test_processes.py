"""test_processes.py: threads, fork after use, and concurrent calls."""

import subprocess
import sys
import threading

import torch
from flash_dmattn import flash_dmattn_func

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
