"""test_examples.py: the examples run, and what they report holds together."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_bytes.py"
TINY = ["--seq", "64", "--batch", "2", "--layers", "1", "--width", "32", "--heads", "2"]


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *TINY, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.rotates(2)
def test_training_on_two_ranks_is_that_on_one():
    script = ROOT / "examples" / "train_context_parallel.py"
    tiny = "--seq 200 --block 16 --layers 2 --width 32 --steps 6 --json".split()
    losses = []
    for ranks, more in ((1, []), (2, ["--recompute", "--fsdp"])):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, str(script), *tiny, *more], capture_output=True, text=True, timeout=300, env=environment
        )
        assert done.returncode == 0, done.stderr
        losses.append(json.loads(done.stdout.splitlines()[-1])["losses"])
    assert losses[0][-1] < losses[0][0] - 0.1
    assert all(abs(a - b) < 1e-4 for a, b in zip(*losses)), losses


def test_train_bytes_learns_and_plots(tmp_path):
    picture = tmp_path / "curves.png"
    saved = ["--save-bias", str(tmp_path / "bias.npy")]
    done = run("--steps", "12", "--window", "8", "--json", "--plot", str(picture), *saved)
    assert done.returncode == 0, done.stderr
    bias = numpy.load(tmp_path / "bias.npy")
    assert bias.shape == (1, 2, 64) and bias.std() > 0
    report = json.loads(done.stdout)
    # 8 of each row's keys, fewer in the first 7 rows.
    assert math.isclose(report["visible_fraction"], (64 * 8 - 28) / (64 * 65 / 2), abs_tol=1e-4)
    for result in report["runs"]:
        curve = result["training_bits_per_byte"]
        assert len(curve) == 12 and curve[-1] < curve[0]
        assert 0 < result["validation_bits_per_byte"] < 8.5
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_window_that_hides_nothing_sees_every_causal_pair(tmp_path):
    done = run("--steps", "1", "--window", "64", "--json", "--plot", str(tmp_path / "curves.png"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["visible_fraction"] == 1.0


@pytest.mark.rotates(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_learns_what_float32_learns(dtype, tmp_path):
    reports = []
    for each in ("float32", dtype):
        done = run("--steps", "12", "--window", "8", "--json", "--dtype", each, "--plot", str(tmp_path / "curves.png"))
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout))
    for wide, narrow in zip(*(report["runs"] for report in reports)):
        assert narrow["training_bits_per_byte"] != wide["training_bits_per_byte"]
        assert abs(narrow["validation_bits_per_byte"] - wide["validation_bits_per_byte"]) < 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: training there is not covered")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_train_bytes_on_cuda(dtype, tmp_path):
    where = ["--device", "cuda", "--dtype", dtype, "--plot", str(tmp_path / "curves.png")]
    done = run("--steps", "60", "--window", "16", "--json", *where)
    assert done.returncode == 0, done.stderr
    masked, dense = json.loads(done.stdout)["runs"]
    assert masked["training_bits_per_byte"][-1] < masked["training_bits_per_byte"][0] - 1
    assert abs(masked["validation_bits_per_byte"] - dense["validation_bits_per_byte"]) < 0.5


@pytest.fixture
def comparison():
    """bench/train_dynamic_masks.py as a module."""
    path = ROOT / "bench" / "train_dynamic_masks.py"
    spec = importlib.util.spec_from_file_location("train_dynamic_masks", path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(path.parent))


def test_the_ways_of_the_comparison_are_one_model(comparison):
    options = types.SimpleNamespace(seq=48, window=7, width=32, heads=2, layers=2, seed=3)
    text = torch.randint(0, 256, (2, 48))
    with torch.no_grad():
        logits = {name: comparison.model_of(way, options)(text) for name, way in comparison.WAYS.items()}
    first, dense, *others = logits.values()
    assert len(others) == 2
    for other in others:
        torch.testing.assert_close(other, first, atol=1e-5, rtol=1e-4)
    assert (dense - first).abs().max() > 1e-3


@pytest.mark.rotates(2)
def test_the_comparison_reports(comparison, tmp_path, capsys):
    small = ["--layers", "1", "--width", "32", "--heads", "2", "--batch", "2", "--window", "8"]
    assert comparison.main(["--seq", "64", "48", "--steps", "10", "4", "--out", str(tmp_path), *small]) == 0
    results = json.loads((tmp_path / "train_dynamic_masks.json").read_text())["results"]
    assert [(each["seq"], each["window"], each["steps"]) for each in results] == [(64, 8, 10), (48, 8, 4)]
    for result in results:
        ours, dense, flex, dense_mask = result["ways"]
        assert flex["failed"] == "NotImplementedError: FlexAttention does not support backward on CPU"
        assert ours["training_bits_per_byte"] == pytest.approx(dense_mask["training_bits_per_byte"], abs=1e-3)
        assert abs(ours["training_bits_per_byte"][-1] - dense["training_bits_per_byte"][-1]) > 1e-5
        assert ours["tokens_per_second"] > 0 and ours["validation_bits_per_byte"] < 9
    assert (tmp_path / "train_dynamic_masks.png").read_bytes().startswith(b"\x89PNG")
    assert "| flash-dmattn, key intervals |" in capsys.readouterr().out


def test_a_way_that_fails_or_takes_long_does_not_end_the_comparison(comparison, tmp_path, monkeypatch):
    def fails(self, q, k, v):
        raise RuntimeError("a sentence. And more\nand more")

    monkeypatch.setattr(comparison.IntervalAttention, "attend", fails)
    small = ["--layers", "1", "--width", "32", "--heads", "2", "--window", "8", "--seq", "48", "--steps", "5000"]
    assert comparison.main([*small, "--seconds", "4", "--out", str(tmp_path)]) == 0
    (result,) = json.loads((tmp_path / "train_dynamic_masks.json").read_text())["results"]
    ours, dense, _, dense_mask = result["ways"]
    assert ours["failed"] == "RuntimeError: a sentence"
    assert 1 <= len(dense["seconds"]) < 5000 and dense["tokens_per_second"] > 0
    assert dense_mask["failed"] == "RuntimeError: a sentence"  # its validation is by key intervals


def test_bad_options_are_named():
    for arguments, sentence in ((("--steps", "0"), "--steps is 0"), (("--device", "tpu"), "--device is tpu")):
        done = run(*arguments)
        assert done.returncode == 2 and sentence in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here: nothing to be refused")
def test_a_missing_device_is_named():
    done = run("--device", "cuda")
    assert done.returncode == 2 and "PyTorch sees no CUDA device" in done.stderr


def test_the_example_for_users_of_flash_attn(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "from-flash-attn.md").read_text(), re.M | re.S)
    assert len(blocks) == 1
    done = subprocess.run([sys.executable, "-c", blocks[0]], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "these have no dropout" in done.stdout


@pytest.mark.rotates(2)
def test_the_examples_for_users_of_other_interfaces(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "moving.md").read_text(), re.M | re.S)
    assert len(blocks) == 3
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("device", ["cpu"] + ["cuda"] * torch.cuda.is_available())
def test_dynamic_mask_layer_generates_what_it_trains(device):
    script = ROOT / "examples" / "dynamic_mask_layer.py"
    done = subprocess.run([sys.executable, str(script), "--device", device], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "48 generated rows" in done.stdout and float(re.search(r"dt_proj: (\S+)", done.stdout)[1]) > 0


@pytest.mark.rotates(2)
def test_serve_gives_each_request_its_own_tokens():
    """Pages of an odd size, too few for all requests, prompts cut into chunks."""
    script = ROOT / "examples" / "serve.py"
    settings = ["--page", "7", "--keys", "200", "--budget", "33", "--requests", "16"]
    done = subprocess.run([sys.executable, str(script), *settings], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["wrong"] == 0 and report["preempted"] > 0 and report["shared_pages"] > 0
