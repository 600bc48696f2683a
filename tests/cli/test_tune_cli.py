"""test_tune.py: fdm tune on the CPU and on files of problems, what it keeps, and the model against recorded timings."""

from __future__ import annotations

import json
import pathlib
import statistics

import pytest
from test_cli import run

RECORD = pathlib.Path(__file__).resolve().parents[2] / "bench/results/nvidia-h200/2026-11-28-tune.json"
PROBLEM = "--seqlen-q 64 --heads 2 --head-dim 32".split()


CACHE = {}


@pytest.fixture(autouse=True)
def own_cache(tmp_path):
    CACHE["FLASH_DMATTN_CACHE_DIR"] = str(tmp_path / "cache")


def run_fdm(*arguments, code=0):
    done = run(*arguments, **CACHE)
    assert done.returncode == code, done.stderr
    return done


def test_one_problem_is_kept_listed_and_forgotten(tmp_path):
    done = run_fdm("tune", "--device", "cpu", "--seconds", "0.05", "--json", *PROBLEM)
    row = json.loads(done.stdout)
    assert row["rows"][0]["rule"] and row["kept"] and row["rows"][0]["seconds"] > 0
    listed = json.loads(run_fdm("tune", "--list", "--json").stdout)
    assert len(listed) == 1 and listed[0]["ignored"] is None and "rows 64" in listed[0]["key"]
    assert "measured 2" in run_fdm("plan", *PROBLEM).stdout
    path = str(tmp_path / "kept.jsonl")
    assert json.loads(run_fdm("tune", "--export", path, "--json").stdout) == {"choices": 1}
    assert run_fdm("tune", "--forget").stdout == "1 kept choices removed\n"
    assert "measured" not in run_fdm("plan", *PROBLEM).stdout
    assert run_fdm("tune", "--import", path).stdout == "1 kept choices taken in\n"
    assert "measured 2" in run_fdm("plan", *PROBLEM).stdout
    pathlib.Path(path).write_text(pathlib.Path(path).read_text().replace("rows 64", "rows 65"))
    assert "kept.jsonl:1: it is no kept choice, or is damaged" in run_fdm("tune", "--import", path, code=2).stderr


def test_a_file_of_problems(tmp_path):
    file = tmp_path / "problems"
    file.write_text(
        "# two\n\n--seqlen-q 32 --head-dim 32\n"
        '{"pass": "backward", "seqlen_q": 40, "head-dim": 32, "causal": true, "window": "7,0", "sink": false}\n'
    )
    done = run_fdm("tune", "--device", "cpu", "--seconds", "0.02", "--no-keep", "--json", "--from", str(file))
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["problem"] for row in rows] == [
        "--seqlen-q 32 --head-dim 32",
        "--pass backward --seqlen-q 40 --head-dim 32 --causal --window 7,0",
    ]
    assert not any(row["kept"] for row in rows)
    assert json.loads(run_fdm("tune", "--list", "--json").stdout) == []


KINDS = [
    "--row-intervals 2",
    "--varlen --row-intervals 3",
    "--block-mask 64",
    "--tree",
    "--varlen --tree",
    "--seqused",
    "--seqused --pass backward",
    "--value-in-key --head-dim-v 16",
    "--cache",
    "--cache-row",
    "--left-padding --causal",
    "--page-size 16",
    "--page-size 16 --page-lists --left-padding",
    "--page-size 16 --cache-row --append --rotary 16 --causal",
    "--page-size 16 --varlen --append --causal",
    "--page-size 16 --tree",
    "--page-size 16 --mask --key-bias --row-intervals 1",
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_problem(kind):
    """Its ways agree, and what is kept for it is taken by it and not by a problem without what it has."""
    words = f"--batch 3 --heads 4 --heads-kv 2 --seqlen-q 12 --seqlen-k 70 --head-dim 32 {kind}".split()
    done = run_fdm("tune", "--device", "cpu", "--seconds", "0.02", "--json", *words)
    row = json.loads(done.stdout)
    assert row["kept"] and all(way["state"] in ("timed", "not timed") for way in row["rows"])
    assert len(row["rows"]) > 1
    listed = json.loads(run_fdm("tune", "--list", "--json").stdout)
    assert len(listed) == 1 and listed[0]["ignored"] is None
    assert "measured 2" in run_fdm("plan", *words).stdout
    also = [word for word in kind.split() if word in ("--pass", "backward", "--causal", "--varlen")]
    other = [*words[:12], *also]
    assert "measured 2" not in run_fdm("plan", *other).stdout


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--from", "/nowhere"], "/nowhere cannot be read"),
        (["--rounds", "16"], "rounds"),
        (["--seconds", "0"], "--seconds is '0'; it must be above 0"),
        (["--seconds"], "--seconds needs a value"),
        (["--list", "--causal"], "time nothing"),
        (["--from", "x", "--causal"], "say two problems"),
    ],
)
def test_wrong_usage(words, sentence):
    assert sentence in run_fdm("tune", *words, code=2).stderr


def ranks(values):
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(i) for i in range(len(values))]


def test_the_model_ranks_as_the_record_does():
    """On problems that were held back: Spearman's coefficient of predicted and measured times."""
    coefficients = []
    for problem in json.loads(RECORD.read_text())["problems"]:
        if problem["number"] % 25 or not problem.get("rows"):
            continue
        done = run_fdm("plan", "--device", "sm_90", "--predict", "--json", *problem["problem"].split())
        predicted = {row["choice"]: row["seconds"] for row in json.loads(done.stdout) if row["seconds"]}
        measured = {row["choice"]: row["seconds"] for row in problem["rows"]}
        both = [choice for choice in measured if choice in predicted]
        if len(both) < 5:
            continue
        x, y = ranks([predicted[choice] for choice in both]), ranks([measured[choice] for choice in both])
        coefficients.append(statistics.correlation(x, y))
    assert len(coefficients) >= 8
    assert statistics.mean(coefficients) > 0.8, coefficients


def test_companions_need_a_cuda_device(tmp_path):
    done = run_fdm("tune", "--device", "cpu", "--op", "gemm", "--M", "64", code=1)
    assert "gemm runs on CUDA devices only" in done.stderr
    assert "--op is 'gem'; it must be gemm or softmax" in run_fdm("tune", "--op", "gem", code=2).stderr
    file = tmp_path / "problems"
    file.write_text('{"op": "softmax", "rows": 64, "columns": 100}\n{"op": "gemm", "M": 64, "beta": 1}\n--seqlen-q 32\n')
    done = run_fdm("tune", "--device", "cpu", "--seconds", "0.02", "--no-keep", "--json", "--from", str(file), code=1)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["problem"] for row in rows] == [
        "--op softmax --rows 64 --columns 100",
        "--op gemm --M 64 --beta 1",
        "--seqlen-q 32",
    ]
    assert "softmax runs on CUDA devices only" in rows[0]["error"] and "error" not in rows[2]


def test_ways_of_the_cpu():
    """Blocks of other sizes, each instruction set that is no step back, and half the threads."""
    words = "--seqlen-q 512 --heads 4 --head-dim 64".split()
    done = run_fdm("tune", "--device", "cpu", "--seconds", "0.3", "--no-keep", "--json", *words)
    rows = json.loads(done.stdout)["rows"]
    threads = max(row["threads"] for row in rows)
    assert {row["threads"] for row in rows} == {threads, max(threads // 2, 1)}
    assert len({row["choice"] for row in rows}) >= 3
    assert all(row["state"] in ("timed", "not timed") for row in rows)
    listed = run_fdm("plan", "--variants", *words).stdout
    assert all(row["choice"] in listed for row in rows)
