"""test_bench_cuda.py: the CUDA benchmark's cases, peers and reports, without a device."""

import csv
import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import truth
from flash_dmattn import _native

import bench_attention as bench
import bench_cuda
import bench_masks
import bench_peers
import bench_report
import bench_selection
from bench_cuda import Case

RECORDED = Path(__file__).resolve().parents[2] / "bench" / "results" / "nvidia-h200"
ALL_CASES = list(bench_cuda.cases(bench_cuda.SETS.split(",")))
OWN_CASES = list(bench_cuda.cases(bench_cuda.OWN_SETS.split(",")))


# ---- cases and what they count ---------------------------------------------------------------------------------------


def test_titles_say_the_whole_case():
    assert len({case.title for case in ALL_CASES if case.name == "forward"}) == 36
    for case in (*ALL_CASES, *OWN_CASES):
        cell = bench_report.cell_of(case.title)
        assert (cell["B"], cell["H"], cell["Hkv"]) == (case.batch, case.heads, case.heads_kv)
        assert (cell["Sq"], cell["Sk"], cell["D"]) == (case.rows, case.keys, case.head_dim)
        assert cell["causal"] == case.causal and cell["extra"] == case.extra
        assert cell["pass"] == ("backward" if case.backward else "forward")
        assert str(case.dtype) == "torch." + cell["dtype"]
    with pytest.raises(ValueError, match="is not the title of a case"):
        bench_report.cell_of("B1 S4 D64")


def test_every_set_has_cases_and_quick_takes_one_of_each():
    assert {case.name for case in ALL_CASES} == set(bench_cuda.SETS.split(","))
    chosen = bench_cuda.quick(ALL_CASES)
    assert [case.name for case in chosen] == list(dict.fromkeys(case.name for case in ALL_CASES))
    assert all(case.keys == 4096 for case in chosen if case.name in ("forward", "backward", "scores", "intervals"))
    assert [case.extra for case in chosen if case.name == "intervals"] == ["top-256"]


def test_own_sets_run_only_by_name():
    assert not {case.name for case in ALL_CASES} & set(bench_cuda.OWN_SETS.split(","))
    assert {case.name for case in OWN_CASES} == set(bench_cuda.OWN_SETS.split(","))
    selection = [case for case in OWN_CASES if case.name == "selection"]
    cells = {(case.head_dim, case.keys, case.causal, case.batch == 1) for case in selection}
    assert len(selection) == len(cells) == len(bench_selection.HEAD_DIMS) * 4 * 2 * 2
    assert all(case.backward and case.rows == case.keys for case in OWN_CASES)


def tiny(extra="", **options):
    settings = {"causal": False, "dtype": torch.float32, "heads_kv": 2, **options}
    return Case("tiny", 2, 4, 48, 16, extra=extra, **settings)


@pytest.mark.parametrize(
    "case",
    [tiny(), *(tiny(causal=True, rows=rows) for rows in (48, 7, 60)), tiny("top-3", causal=True, heads_kv=4)],
)
def test_visible_pairs_are_what_the_masks_show(case):
    p = bench_cuda.make_problem(case, "cpu")
    visible = torch.ones(case.batch, case.heads, case.rows, case.keys, dtype=torch.bool)
    if case.causal:
        visible = visible.tril(case.keys - case.rows)
    if p.intervals is not None:
        from flash_dmattn import masks

        visible = visible & masks.intervals_to_mask(*p.intervals, case.rows)
    assert bench_report.visible_pairs(bench_report.cell_of(case.title)) == visible.sum().item()


def test_flops_follow_the_conventions():
    for causal, backward, factor in ((False, False, 4), (True, False, 2), (False, True, 10), (True, True, 5)):
        assert tiny(causal=causal, backward=backward).flops == factor * 2 * 4 * 48 * 48 * 16
    cell = bench_report.cell_of(tiny(backward=True).title)
    assert bench_report.useful_flops(cell, 10.0) == 4 * 16 * 10 * 2.5
    assert bench_report.visible_pairs(bench_report.cell_of(tiny("dense mask").title)) is None
    decode = bench_report.cell_of("B2 H32/8 Sq1 Sk1000 D128 bfloat16")
    assert bench_report.moved_bytes(decode) == 2 * 2 * 8 * 1000 * 128 * 2
    assert bench_report.moved_bytes(decode, 2 * 32 * 1000.0) == bench_report.moved_bytes(decode)
    top = bench_report.cell_of("B1 H32/8 Sq1 Sk1000 D128 bfloat16 causal top-50")
    assert bench_report.moved_bytes(top, bench_report.visible_pairs(top)) == 2 * 8 * 50 * 128 * 2 + 8 * 8 * 1000


def test_one_query_row_sees_what_its_title_says():
    case = bench_cuda.Case("decode", 4, 8, 40, 16, heads_kv=2, rows=1, extra="padded")
    padded = bench_cuda.make_problem(case, "cpu")
    assert bench_cuda.visible_pairs(case, padded) == 8 * 100
    assert bench_cuda.runners(case, padded, [])["copy"]().numel() * 2 == 2 * 2 * 100 * 16 * 2 + 4 * 40
    assert padded.mask.shape == (4, 1, 1, 40) and padded.mask.sum(dim=(1, 2, 3)).tolist() == [10, 20, 30, 40]
    case = bench_cuda.Case("decode", 1, 8, 40, 16, causal=True, heads_kv=2, rows=1, extra="top-5")
    start, end = bench_cuda.make_problem(case, "cpu").intervals
    assert start.shape == (1, 2, 40) and ((start <= 0) & (end > 0)).sum(dim=-1).tolist() == [[5, 5]]
    assert bench_report.visible_pairs(bench_report.cell_of(case.title)) == 8 * 5


@pytest.mark.parametrize("extra, causal", bench_masks.KINDS)
@pytest.mark.parametrize("keys", [48, 4096])
def test_masks_of_the_grid_are_the_same_by_rows_and_by_keys(extra, causal, keys):
    from flash_dmattn import masks

    first, end = bench_masks.row_ranges(extra, causal, keys)
    key = torch.arange(keys)
    by_rows = (first[:, None] <= key) & (key < end[:, None])
    assert (end > first).all() and (first.diff() >= 0).all() and (end.diff() >= 0).all()
    assert torch.equal(masks.intervals_to_mask(*bench_masks.key_intervals(first, end), keys)[0, 0], by_rows)
    case = Case("mask-grid", 1, 2, keys, 16, causal=causal, extra=extra)
    p = bench_cuda.make_problem(case, "cpu")
    assert bench_cuda.visible_pairs(case, p) == 2 * by_rows.sum().item()
    assert (bench_report.visible_pairs(bench_report.cell_of(case.title)) is None) == (extra != "alone")


def test_ways_of_the_grid_say_one_mask():
    for extra, causal in bench_masks.KINDS:
        p = bench_cuda.make_problem(Case("mask-grid", 1, 2, 128, 16, dtype=torch.float32, causal=causal, extra=extra), "cpu")
        ours = bench_cuda.run_ours(p)
        calls = bench_masks.ways(p)
        assert list(calls) == [bench_report.OURS + way for way in (", by rows", ", plan kept", ", by rows, plan kept")]
        assert all(torch.allclose(call(), ours, atol=1e-5) for call in calls.values())
        assert all(plan() for plan in bench_masks.plan_calls(p).values())


def test_peers_of_the_grid_are_compared_by_kept_plans_and_with_plans_made():
    ours, peer = bench_report.OURS, "cudnn flex"
    seconds = {ours: [2.0, 5.0], ours + bench_report.KEPT: [1.5], peer: [3.0, 9.0], peer + bench_report.PLAN: [1.0]}
    title = "B1 H4 S8192 D64 bfloat16 causal prefix-2048"
    result = {"set": "mask-grid", "title": title, "flops": 1.0, "seconds": seconds}
    table = bench_report.rows({"results": [result], "ceilings": {"copy_bytes_per_second": 1e12}})
    row = next(row for row in table if row["contender"] == peer)
    assert (row["time_over_ours"], row["over_ours_with_plans"]) == (2.0, 2.0)
    assert {row["contender"]: row["time_over_ours"] for row in table}[ours + bench_report.KEPT] == 0.75


def test_the_grid_is_drawn_with_a_dot_for_each_peer_and_none_for_plans(tmp_path, monkeypatch):
    plots = pytest.importorskip("bench_plots")
    drawn = []
    seconds = {bench_report.OURS: [2.0, 4.0], "cudnn flex": [3.0, 9.0], "cudnn flex" + bench_report.PLAN: [1.0]}
    results = [
        {"set": name, "title": f"B1 H4 S8192 D64 bfloat16 causal prefix-2048{way}", "flops": 1.0, "seconds": seconds}
        for name, way in (("mask-grid", ""), ("backward-mask-grid", " backward"))
    ]
    plot = plots.pyplot.Axes.plot
    monkeypatch.setattr(plots.pyplot.Axes, "plot", lambda *a, **k: drawn.append((a[1], k["label"])) or plot(*a, **k))
    report = {"results": results, "ceilings": {"copy_bytes_per_second": 1e12}}
    plots._mask_grid(bench_report.rows(report), "a title", tmp_path / "grid.png")
    assert drawn == [(1.5, "cudnn flex, S8192")] * 2
    assert (tmp_path / "grid.png").stat().st_size > 1000


# ---- peers -----------------------------------------------------------------------------------------------------------


def expected(p):
    bias = None if p.bias is None else p.bias.detach()
    return truth(p.q, p.k, p.v, mask=p.mask, bias=bias, causal=p.causal, intervals=p.intervals)[0]


FEATURES = [
    tiny(),
    tiny(causal=True),
    tiny("dense bias"),
    tiny("bias of each head", heads_kv=4),
    tiny("dense mask"),
    tiny("top-3", causal=True),
    tiny("top-3 and bias", causal=True, heads_kv=1),
    tiny("top-3 and bias", causal=True, rows=20),
    *(tiny(extra, causal=causal) for extra, causal in bench_masks.KINDS),
]


@pytest.mark.parametrize("name", ["torch flash", "torch math", "flex"])
@pytest.mark.parametrize("case", FEATURES, ids=lambda case: case.title)
def test_peers_compute_what_we_compute(name, case):
    p = bench_cuda.make_problem(case, "cpu")
    peer = bench_peers.PEERS[name]
    assert peer.missing() is None
    if peer.refuses(p):
        assert name == "torch flash" and not p.is_plain
        return
    out = peer.prepare(p)()
    assert out.shape == p.q.shape and (out - expected(p)).abs().max() < 1e-4
    assert (bench_cuda.run_ours(p) - expected(p)).abs().max() < 1e-4


def test_gradients_of_ours_and_a_peer_agree():
    for case in (tiny(causal=True, backward=True), tiny("dense bias", backward=True)):
        calls = bench_cuda.runners(case, bench_cuda.make_problem(case, "cpu"), ["torch math"])
        assert list(calls) == ["flash_dmattn", "torch math"]
        assert bench_cuda.differences(calls)["torch math"] < 1e-5
        assert len(calls["flash_dmattn"]()) == (4 if case.extra else 3)


def test_refusals_say_why(monkeypatch, capsys):
    of = bench_peers.PEERS
    plain, masked = (bench_cuda.make_problem(case, "cpu") for case in (tiny(), tiny("top-3", causal=True)))
    assert "no mask" in of["torch flash"].refuses(masked) and "no mask" in of["flash-attn 3"].refuses(masked)
    monkeypatch.setattr(bench_peers, "DENSE_BYTES_MAX", 100)
    assert "dense mask would not fit" in of["torch efficient"].refuses(masked) and of["flex"].refuses(masked) is None
    monkeypatch.setattr(bench_peers, "MATH_SCORES_MAX", 100)
    assert "scores would not fit" in of["torch math"].refuses(plain) and of["torch flash"].refuses(plain) is None
    shorter = bench_cuda.make_problem(tiny(causal=True, rows=7), "cpu")
    assert "first key" in of["torch flash"].refuses(shorter)
    fixed = bench_cuda.make_problem(tiny("deterministic"), "cpu")
    assert all(peer.refuses(fixed) for peer in of.values())
    calls = bench_cuda.forwards(tiny("deterministic"), fixed, ["flex"])
    assert list(calls) == ["flash_dmattn"] and "flex is left out: it has no switch" in capsys.readouterr().err


def test_flash_attn_is_found_and_called(monkeypatch):
    seen = []

    def attend(q, k, v, causal):
        seen.append(causal)
        return (q * 2, None)

    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_func = attend
    peer = bench_peers.PEERS["flash-attn 3"]
    assert peer.missing() == "flash_attn_interface is not installed"
    assert bench_peers.PEERS["flash-attn 4"].missing() == "flash_attn.cute is not installed"
    module.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    assert peer.missing() is None and "flash-attn 3" in bench_peers.installed()
    case = tiny(causal=True, peers=("torch math",))
    calls = bench_cuda.forwards(case, bench_cuda.make_problem(case, "cpu"), None)
    assert list(calls) == ["flash_dmattn", "torch math", "flash-attn 3"]
    assert calls["flash-attn 3"]().shape == (2, 48, 4, 16) and seen == [True]


# ---- plans of this library beside each other -------------------------------------------------------------------------


def test_contenders_of_the_selection():
    for head_dim in bench_selection.HEAD_DIMS:
        found = bench_selection.contenders("selection", head_dim)
        assert found["flash_dmattn"] == (None, None) and found["low memory"].memory == ":smem=99K"
        assert found["old rule"].memory is None and found["old rule"].kernel == found["old rule bare"].kernel
        assert ("V shared" in found) == (head_dim <= 128)
    assert list(bench_selection.contenders("tiles", 64)) == ["flash_dmattn", *bench_selection.TILES]


def test_runners_compute_what_the_function_computes(monkeypatch):
    case = Case("selection", 2, 4, 48, 16, causal=True, dtype=torch.float32, backward=True)
    problem = bench_cuda.make_problem(case, "cpu")
    wishes = {"flash_dmattn": (None, None), "by name": (None, "reference.backward")}
    monkeypatch.setattr(bench_selection, "contenders",
                        lambda name, head_dim: {key: bench_selection.Choice(*wish) for key, wish in wishes.items()})
    calls = bench_cuda.runners(case, problem)
    assert calls["by name"].plan["choice"] == "REFERENCE" and calls["flash_dmattn"].plan["device"] is None
    out = bench_cuda.run_ours(problem)
    expected = torch.autograd.grad(out, [problem.q, problem.k, problem.v], calls["flash_dmattn"].saved[2])
    assert all(torch.equal(a, b) for a, b in zip(calls["flash_dmattn"](), expected))
    assert bench_cuda.differences(calls)["by name"] < 1e-5
    wishes["no such code"] = (None, "SM90_NoSuchTile")
    with pytest.raises((NotImplementedError, ValueError), match="SM90_NoSuchTile"):
        bench_cuda.runners(case, problem)
    monkeypatch.setattr(case, "name", "tiles")
    assert list(bench_cuda.runners(case, problem)) == ["flash_dmattn", "by name"]


def test_plans_for_other_devices_say_what_is_wrong():
    q = torch.zeros(1, 4, 1, 8)
    inputs = {"q": q, "k": q, "v": q}
    tensors = inputs | {"out": torch.empty_like(q), "lse": torch.empty(1, 1, 4)}
    assert bench_selection.run_as(None, None, tensors)["pass"] == "forward"
    with pytest.raises(ValueError, match="device 'sm_77' is unknown"):
        bench_selection.run_as("sm_77", None, tensors)
    with pytest.raises(ValueError, match="plan is for"):
        bench_selection.run_as("sm_90:smem=99K", None, tensors)
    with pytest.raises(ValueError, match="out is NULL|out"):
        bench_selection.run_as(None, None, inputs)
    with pytest.raises(TypeError, match="23 tensors are needed, 3 were given"):
        _native.run_as(None, None, (None,) * 3, False, 0.0, 0, None)
    for bad in ((), (3, None, (None,) * 20, False, 0.0, 0, None), (None, None, [None] * 20, False, 0.0, 0, None)):
        with pytest.raises(TypeError):
            _native.run_as(*bad)


# ---- reports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_recorded_results_become_a_table_and_plots(name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (recorded,) = RECORDED.glob(f"*-{name}-mma.json")
    table = tmp_path / "table.csv"
    options = ["--device", "cuda", "--from", str(recorded), "--csv", str(table), "--plot", str(tmp_path / "plots")]
    assert bench.main(options) == 0
    text = capsys.readouterr().out
    assert f"{name}: torch flash takes" in text
    rows = list(csv.DictReader(table.open()))
    results = json.loads(recorded.read_text())["results"]
    assert len(rows) == sum(len(result["seconds"]) for result in results)
    assert list(rows[0]) == list(bench_report.COLUMNS)
    first, samples = rows[0], sorted(results[0]["seconds"]["flash_dmattn"])
    assert float(first["median_ms"]) == pytest.approx(1e3 * samples[len(samples) // 2], rel=1e-4)
    assert float(first["tflops"]) == pytest.approx(results[0]["flops"] / samples[len(samples) // 2] * 1e-12, rel=1e-4)
    counted = any("useful_flops" in result for result in results if "dense mask" in result["title"])
    for row in rows:
        assert float(row["quartile_low_ms"]) <= float(row["median_ms"]) <= float(row["quartile_high_ms"])
        assert bool(row["tb_per_s"]) == (row["set"] == "decode")
        assert (row["useful_tflops"] == "") == (row["extra"] == "dense mask" and not counted)
    written = {path.name for path in (tmp_path / "plots").iterdir()}
    assert written == {f"cuda_{name}.png", "cuda_masks.png"} | ({"cuda_decode.png"} if name == "forward" else set())
    assert "TB/s (" in text if name == "forward" else "decode" not in text


def script(name):
    spec = importlib.util.spec_from_file_location(name, RECORDED.parents[2] / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["selection", "tiles"])
def test_the_page_of_the_selection_shows_the_recorded_results(name, tmp_path, capsys):
    tables, page = script("cuda_table"), (RECORDED.parents[2] / "docs" / "lab" / "backward_choice.md").read_text()
    recorded = RECORDED / re.search(rf"<!-- {name} measured -->.*?/([^/\s]*-{name}[^/\s]*\.json)", page, re.DOTALL)[1]
    data = json.loads(recorded.read_text())
    table = getattr(tables, name)(data)
    assert table in page
    cells = {tables.cell(result) for result in data["results"]}
    assert cells == {(case.head_dim, case.batch, case.rows, case.causal) for case in OWN_CASES if case.name == name}
    assert all(set(result["plans"]) == set(result["seconds"]) for result in data["results"])
    first = data["results"][0]
    other = next(each for each in first["seconds"] if each != "flash_dmattn")
    ratio = sorted(first["seconds"][other])[2] / sorted(first["seconds"]["flash_dmattn"])[2]
    assert len(first["seconds"][other]) == 5 and tables.ratios([first], other) == [pytest.approx(ratio)]
    assert bench.main(["--device", "cuda", "--from", str(recorded)]) == 0
    assert f"{name}: {other} takes" in capsys.readouterr().out


def test_the_pages_show_the_recorded_occupancy():
    occupancy, recorded = script("occupancy"), RECORDED / "2026-11-21-occupancy.json"
    assert occupancy.write(recorded, check=True) == 0
    for row in json.loads(recorded.read_text())["tiles"]:
        if not row["memory"]:
            share = row["theory"]["warps_per_sm"] / row["theory"]["max_warps"]
            assert row["counted"]["theoretical"] == pytest.approx(100 * share)


def test_the_profilers_table_is_joined_row_by_row():
    occupancy = script("occupancy")
    metrics = {"achieved": "sm__warps_active", "microseconds": "gpu__time_duration.sum", "waves": "absent"}
    rows = [{"theory": {"entry": entry}} for entry in ("mma_forward", "mma_decode")]
    text = ('==PROF== Connected\n"ID","Kernel Name","sm__warps_active","gpu__time_duration.sum"\n"","","%","ms"\n'
            '"0","mma_forward","12.5","1,250.5"\n"1","mma_decode","6.25","n/a"\n')
    occupancy.join(rows, text, metrics)
    assert [row["counted"] for row in rows] == [{"achieved": 12.5, "microseconds": 1250500.0}, {"achieved": 6.25}]
    with pytest.raises(SystemExit, match="the profiler saw mma_forward in the place of mma_decode"):
        occupancy.join(rows[::-1], text, metrics)
    with pytest.raises(SystemExit, match="1 kernels were launched, the profiler saw 2"):
        occupancy.join(rows[:1], text, metrics)


def test_a_counted_mask_has_useful_flops():
    seconds = {"flash_dmattn": [1e-3, 2e-3, 3e-3], "flex": [4e-3, 4e-3, 4e-3]}
    result = {"set": "scores", "title": "B1 H16 S4096 D128 bfloat16 dense mask", "flops": 4e12, "useful_flops": 2e12}
    report = {"ceilings": {"copy_bytes_per_second": 1e12}, "results": [result | {"seconds": seconds}]}
    ours, flex = bench_report.rows(report)
    assert (ours["tflops"], ours["useful_tflops"], ours["median_ms"]) == (2000, 1000, 2)
    assert (flex["time_over_ours"], flex["quartile_low_ms"], flex["contender"]) == (2, 4, "flex")


def test_one_query_row_is_told_beside_a_copy():
    seconds = {"flash_dmattn": [2e-6] * 3, "torch cudnn": [4e-6] * 3}
    result = {"set": "decode", "title": "B1 H8/2 Sq1 Sk1000 D128 bfloat16", "flops": 1e6}
    report = {"ceilings": {"copy_bytes_per_second": 1e12}, "results": [result | {"seconds": seconds}]}
    assert bench_report.rows(report)[0]["share_of_copy"] == pytest.approx(1.024e6 / 2e-6 / 1e12)
    report["results"].append(result | {"seconds": seconds | {"copy": [1e-6] * 3}})
    assert [row["share_of_copy"] for row in bench_report.rows(report)[2:]] == [0.5, 0.25, 1.0]
    table = script("cuda_table").decode(report).splitlines()
    assert table[-1].split(" | ")[1:5] == ["2.0", "0.51", "**0.50**", "0.51"] and "2.00x" in table[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here: nothing to be refused")
def test_without_a_device_one_line_says_so(capsys):
    assert bench.main(["--device", "cuda"]) == 1
    assert capsys.readouterr().err == "bench: PyTorch sees no CUDA device\n"


@pytest.mark.parametrize("options", [["--cases", "forwards"], ["--peers", "flash"], ["--rounds", "0"]])
def test_bad_options_are_named(options, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["--device=cuda", *options])
    assert stop.value.code == 2 and repr(options[1]).strip("'") in capsys.readouterr().err
