"""test_tune.py: tune() on the CPU, and what is wrong with its arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest
from flash_dmattn import tune, tune_gemm, tune_softmax

SHAPE = (1, 96, 2, 32)


def test_ways_of_the_cpu():
    best, ways = tune(SHAPE, SHAPE, dtype="float32", device="cpu", seconds=0.1, keep=False)
    assert ways[0].is_rule and ways[0].state == "timed" and ways[0].seconds > 0
    assert 0 <= best < len(ways)
    assert all(way.state in ("timed", "not timed") and way.kernel.startswith("cpu.forward.") for way in ways)
    assert len({way.choice for way in ways}) > 1
    _, backward = tune(SHAPE, SHAPE, dtype="float32", device="cpu", seconds=0.1, keep=False, backward=True, topk=16)
    assert backward[0].kernel.startswith("cpu.backward.")


@pytest.mark.parametrize(
    "words",
    [
        {"row_intervals": 2},
        {"block_mask": 64},
        {"tree": True},
        {"seqused": True},
        {"seqused": True, "backward": True},
        {"cached": True},
        {"cache_batch_idx": True},
        {"page_size": 16, "cache_leftpad": True},
        {"page_size": 16, "page_start": True, "seqused": True},
        {"page_size": 16, "new_keys": 5, "rotary_dim": 16, "is_causal": True},
        {"new_keys": 5, "is_causal": True},
    ],
)
def test_masks_lengths_and_caches(words):
    best, ways = tune((3, 5, 4, 32), (3, 70, 2, 32), dtype="float32", device="cpu", seconds=0.02, keep=False, **words)
    assert ways[0].is_rule and ways[0].state == "timed" and 0 <= best < len(ways)
    assert all(way.state in ("timed", "not timed") for way in ways)


def test_a_choice_for_pages_is_taken_by_pages(tmp_path, monkeypatch):
    """By a call of the same class in another process, and not by one whose cache is contiguous."""
    monkeypatch.setenv("FLASH_DMATTN_CACHE_DIR", str(tmp_path))
    code = """
import numpy, flash_dmattn
flash_dmattn.tune((2, 1, 4, 32), (2, 512, 2, 32), page_size=16, is_causal=True, dtype="float32", device="cpu",
                  seconds=0.05)
q = numpy.zeros((2, 1, 4, 32), numpy.float32)
pages = numpy.zeros((64, 16, 2, 32), numpy.float32)
table = numpy.arange(64, dtype=numpy.int32).reshape(2, 32)
lengths = numpy.array([500, 300], numpy.int32)
for keys, more in ((pages, {"block_table": table}), (pages.reshape(2, 512, 2, 32), {})):
    print(flash_dmattn.flash_dmattn_with_kvcache_func(q, keys, keys, cache_seqlens=lengths, **more).shape)
"""
    monkeypatch.setenv("FLASH_DMATTN_LOG", "1")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("measured 2") == 1, done.stderr


def test_what_is_kept_is_taken(tmp_path, monkeypatch):
    """In another process: this one has made its settings up."""
    monkeypatch.setenv("FLASH_DMATTN_CACHE_DIR", str(tmp_path))
    code = f"""
import numpy, flash_dmattn
flash_dmattn.tune({SHAPE}, {SHAPE}, dtype="float32", device="cpu", seconds=0.1)
q = numpy.zeros({SHAPE}, numpy.float32)
flash_dmattn.attention(q, q, q)
"""
    monkeypatch.setenv("FLASH_DMATTN_LOG", "1")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "measured 2" in done.stderr
    assert len(list(tmp_path.glob("tuned/*.tune"))) == 1


def test_wrong_arguments():
    with pytest.raises(ValueError, match="query is a shape of 3 axes"):
        tune(SHAPE[1:], SHAPE, device="cpu")
    with pytest.raises(ValueError, match="do not fit together"):
        tune(SHAPE, (2, *SHAPE[1:]), device="cpu")
    with pytest.raises(ValueError, match="device is 'gpu'"):
        tune(SHAPE, SHAPE, device="gpu")
    with pytest.raises(ValueError, match="device is 'cuda:x'"):
        tune(SHAPE, SHAPE, device="cuda:x")
    with pytest.raises(ValueError, match="block_mask_size is 32"):
        tune(SHAPE, SHAPE, dtype="float32", device="cpu", block_mask=32)
    with pytest.raises(ValueError, match="cache is -1"):
        tune(SHAPE, SHAPE, dtype="float32", device="cpu", page_size=-1)
    with pytest.raises((ValueError, NotImplementedError), match="forward only"):
        tune(SHAPE, SHAPE, dtype="float32", device="cpu", cached=True, backward=True)
    with pytest.raises((ValueError, NotImplementedError), match="dtype"):
        tune(SHAPE, SHAPE, dtype="int8", device="cpu")


def test_companions_need_a_cuda_device():
    """The ways themselves are timed by tests/faults, on a pretended device."""
    with pytest.raises(NotImplementedError, match="gemm runs on CUDA devices only"):
        tune_gemm(64, 64, 64, device="cpu")
    with pytest.raises(NotImplementedError, match="softmax runs on CUDA devices only"):
        tune_softmax(64, 64, device="cpu", backward=True, log=True)
    with pytest.raises((ValueError, NotImplementedError), match="gemm takes float16 and bfloat16"):
        tune_gemm(64, 64, 64, device="cpu", dtype="float32")
    with pytest.raises(ValueError, match="must be 0 to 2"):
        tune_gemm(-1, 64, 64, device="cpu")
