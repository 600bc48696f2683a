"""test_examples.py: the examples run, and what they report holds together."""

import json
import math
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_bytes.py"
TINY = ["--seq", "64", "--batch", "2", "--layers", "1", "--width", "32", "--heads", "2"]


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *TINY, *arguments], capture_output=True, text=True, timeout=300)


def test_train_bytes_learns_and_plots(tmp_path):
    picture = tmp_path / "curves.png"
    done = run("--steps", "12", "--window", "8", "--json", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
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


def test_bad_options_are_named():
    done = run("--steps", "0")
    assert done.returncode == 2 and "--steps is 0" in done.stderr
