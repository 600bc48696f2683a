"""test_bench.py: the benchmark runs, checks itself, and writes what it says it writes."""

import csv
import json
import pathlib

import pytest
import torch

import bench_attention as bench
import host_time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TINY = ["--S", "24", "--D", "8", "--H", "4", "--Hkv", "2", "--iters", "2", "--dtype", "fp32", "--check"]


@pytest.mark.parametrize("extra", [[], ["--topk", "5"], ["--mask", "0.3", "--bias"], ["--mode", "both"], ["--decode"]])
def test_grid(extra, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert bench.main([*TINY, *extra, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert {"command", "commit", "device", "versions", "records", "geometric_means"} <= report.keys()
    assert report["records"]
    for record in report["records"]:
        assert set(record["results"]) >= {"flash-dmattn", "sdpa-flash"}
        assert all(len(row["samples_ms"]) == 2 for row in record["results"].values())
        assert all(error < 1e-4 for error in record["error_against_float64"].values())
    assert "geometric mean, forward over sdpa-flash" in capsys.readouterr().out


@pytest.mark.parametrize("extra", [[], ["--topk", "5"], ["--mask", "0.3", "--bias"], ["--decode"]])
def test_jax_beside_its_own_attention(extra, tmp_path, capsys):
    pytest.importorskip("jax")
    path = tmp_path / "report.json"
    assert bench.main([*TINY, "--jax", *extra, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert "jax" in report["versions"]
    assert {record["pass"] for record in report["records"]} == ({"forward"} if "--decode" in extra else {"forward", "step"})
    for record in report["records"]:
        errors = record["error_against_float64"]
        assert set(record["results"]) == set(errors) >= {"flash-dmattn", "jax-xla"}
        assert errors["flash-dmattn"] < 1e-4
        assert not errors["jax-xla"] >= 1e-4  # NaN where a row of a random mask sees no key
    assert "geometric mean, forward over jax-xla" in capsys.readouterr().out
    for wrong in (["--threads", "1"], ["--pair-bias", "--bias-gradient"]):
        with pytest.raises(SystemExit):
            bench.main(["--jax", *wrong])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_files_that_cannot_be_written_are_known_before_the_work(device, option, tmp_path, capsys):
    (tmp_path / "file").write_text("old")
    for path in (tmp_path / "file" / "report", tmp_path):
        with pytest.raises(SystemExit) as ended:
            bench.main(["--device", device, option, str(path)])
        printed = capsys.readouterr()
        assert ended.value.code == 2 and printed.out == "" and f"error: {path} cannot be written: " in printed.err
    assert (tmp_path / "file").read_text() == "old"


def test_visible_pairs_are_counted(tmp_path):
    path = tmp_path / "report.json"
    bench.main([*TINY, "--causal", "--topk", "5", "--direction", "forward", "--json", str(path)])
    (record,) = json.loads(path.read_text())["records"]
    row = record["results"]["flash-dmattn"]
    pairs = 4 * sum(min(i + 1, 5) for i in range(24))
    assert row["useful_tflops"] == pytest.approx(4 * 8 * pairs / row["median_ms"] * 1e-9)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_bias_of_pairs_in_processor_time(direction, tmp_path):
    path = tmp_path / "report.json"
    options = ["--pair-bias", "--threads", "1", "--cpu-time", "--direction", direction, "--json", str(path)]
    assert bench.main([*TINY, *options]) == 0  # TINY has --check
    assert all("bias of pairs" in record["title"] for record in json.loads(path.read_text())["records"])


def test_a_bias_gradient_is_measured_beside_the_peers_own(tmp_path):
    path = tmp_path / "report.json"
    assert bench.main([*TINY, "--pair-bias", "--bias-gradient", "--direction", "backward", "--json", str(path)]) == 0
    for record in json.loads(path.read_text())["records"]:
        assert "bias of pairs with its gradient" in record["title"]
        assert set(record["results"]) > {"flash-dmattn"}
    with pytest.raises(SystemExit):
        bench.main([*TINY, "--bias-gradient"])


def test_one_query_row_stands_beside_the_memory(tmp_path):
    path = tmp_path / "report.json"
    assert bench.main([*TINY, "--decode", "--json", str(path)]) == 0
    (record,) = json.loads(path.read_text())["records"]
    assert record["results"]["memory-read"]["median_ms"] > 0
    assert "memory-read" not in record["error_against_float64"]


def test_processor_time_is_of_one_thread():
    with pytest.raises(SystemExit):
        bench.main([*TINY, "--cpu-time"])


def test_sweeps_say_what_they_sweep():
    plots = pytest.importorskip("bench_plots")
    record = {"title": "B1 H8 S2048 D64 fp32 causal top-512 2 threads"}
    device = {"cpu": "a part", "torch_threads": 4}
    for kind, first in {
        "threads": "forward by threads: B1 H8 S2048 D64 fp32 causal top-512",
        "S": "forward by sequence length: B1 H8 D64 fp32 causal top-512 2 threads",
        "visible": "forward by keys kept per row / sequence length: B1 H8 S2048 D64 fp32 causal 2 threads",
    }.items():
        title = plots.sweep_title(kind, "forward", record, device)
        assert title.splitlines()[0] == first
        assert ("4 threads" in title) == (kind != "threads")


def test_a_wrong_result_fails(monkeypatch):
    right = bench.run_ours
    monkeypatch.setattr(bench, "run_ours", lambda cell, p: right(cell, p) * 1.2)
    assert bench.main([*TINY, "--direction", "forward"]) == 1


def test_csv_and_plots(tmp_path):
    pytest.importorskip("matplotlib")
    table = tmp_path / "table.csv"
    options = ["--sweep", "threads", "visible", "--csv", str(table), "--plot", str(tmp_path / "plots")]
    assert bench.main([*TINY, *options]) == 0
    rows = list(csv.DictReader(table.open()))
    assert {row["contender"] for row in rows} >= {"flash-dmattn", "sdpa-flash"}
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {f"bench_{kind}_{way}.png" for kind in ("threads", "visible") for way in ("forward", "backward")}
    assert bench.main([*TINY, "--plot", str(tmp_path / "bars"), "--direction", "forward"]) == 0
    assert (tmp_path / "bars" / "bench_grid_forward.png").stat().st_size > 1000


def test_overhead(capsys):
    assert bench.main(["--overhead"]) == 0
    assert capsys.readouterr().out.count("us") >= 6


def test_outside_of_a_checkout_a_sentence_says_where_it_is(tmp_path, capsys):
    from flash_dmattn import bench as installed

    assert installed.main(["--root", str(tmp_path), "--S", "24"]) == 2
    assert f"{tmp_path / 'bench'} holds no benchmark; run it in a checkout" in capsys.readouterr().err
    root = str(ROOT)
    with pytest.raises(SystemExit) as stop:
        installed.main(["--root", root, "--help"])
    assert stop.value.code == 0
    assert "--bias-gradient" in capsys.readouterr().out


def test_host_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    path = tmp_path / "host_time.json"
    host_time.main(["--device", "cpu", "--calls", "2", "--batches", "3", "--json", str(path)])
    report = json.loads(path.read_text())
    assert {"command", "commit", "device", "processor", "versions"} <= report.keys()
    groups, printed = report["microseconds"], capsys.readouterr().out
    assert {"own", "forward", "packed", "cache", "cache, new keys", "pages, packed rows"} <= set(groups)
    for name, ways in groups.items():
        assert name in printed and len(ways) >= 3 and next(iter(ways.values()))["over"] == 0
        for way, found in ways.items():
            assert way in printed and len(found["samples"]) == 3 and 0 < found["least"] <= found["quartiles"][0]
    for wrong in (["--only", "nothing"], ["--batches", "1"], ["--calls", "0"]):
        with pytest.raises(SystemExit):
            host_time.main(["--device", "cpu", *wrong])


def test_ways_of_host_time_compute_the_same():
    problem = host_time.Problem("cpu")
    for groups in (host_time.groups_of_dense_names(problem), host_time.groups_of_cache_names(problem)):
        for name, ways in groups.items():
            results = {way: call() for way, call in ways.items()}
            outs = {way: result[0] if isinstance(result, tuple) else result for way, result in results.items()}
            for way, out in outs.items():
                assert torch.equal(out, outs[host_time.OWN]), (name, way)
            if name.endswith("lse"):
                assert all(torch.equal(result[1], results[host_time.OWN][1]) for result in results.values())
    for name, call in host_time.groups_of_own(problem)["own"].items():
        problem.out.fill_(float("nan"))
        call()
        assert problem.out.isnan().any() != (name.startswith("floor") or "given out" in name)
