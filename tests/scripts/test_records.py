"""Results become records, records become the page of what was verified, and pages that name what is not there are faults."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
MARKERS = "".join(f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in ("hardware", "emulated", "compiled", "cpu", "other"))


@pytest.fixture
def root(tmp_path):
    """A tree with nothing but the scripts and a page without tables."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "scripts").mkdir()
    for name in ("record.py", "verified.py", "check_docs.py", "kernel_renames.py", "marked_table.py"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts")
    (tmp_path / "docs/verified.md").write_text("# What was verified\n\n" + MARKERS)
    (tmp_path / "README.md").write_text("# readme\n")
    (tmp_path / "CONTRIBUTING.md").write_text("# contributing\n")
    return tmp_path


def run(root, script, *arguments):
    return subprocess.run([sys.executable, root / "scripts" / script, *map(str, arguments)], capture_output=True, text=True)


def checked(folder, name, kernel, right, wrong=0):
    line = {"kernel": kernel, "device": "sm_90", "emulated": False, "seed": 1, "seeds": 50, "right": right, "wrong": wrong, "refused": 3}
    with (folder / name).open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def test_a_run_on_a_device_becomes_a_table(root):
    folder, results = root / "logs", root / "bench/results/device/checks.json"
    folder.mkdir()
    checked(folder, "checks-0.jsonl", "mma.forward", 20)
    checked(folder, "checks-1.jsonl", "mma.forward", 22)
    checked(folder, "mma.forward-racecheck.jsonl", "mma.forward", 7)
    (folder / "mma.forward-racecheck.log").write_text("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n")
    (folder / "hopper-probe.log").write_text("exact m 1: 0 elements differ\nexact m 2: 0 elements differ\n")
    (folder / "instruction-check.log").write_text("| | instruction |\n|---|---|\n| agrees | ldmatrix_x4 |\n")
    done = run(root, "record.py", "checks", results, folder)
    assert done.returncode == 0, done.stderr
    runs = {(each["subject"], each["check"]): each for each in json.loads(results.read_text())["runs"]}
    assert runs["mma.forward", "problems"]["right"] == 42
    assert runs["mma.forward", "racecheck"]["findings"] == 2
    assert runs["hopper-probe", "problems"]["right"] == 2
    assert runs["instruction-check", "problems"]["right"] == 1
    assert run(root, "verified.py", "--check").returncode == 1
    assert run(root, "verified.py").returncode == 0
    assert run(root, "verified.py", "--check").returncode == 0
    page = (root / "docs/verified.md").read_text()
    assert "| `mma.forward` | problems | 42 | " in page
    assert "| `mma.forward` | racecheck | 7, 2 findings | " in page


def test_a_newer_run_replaces_the_older_and_a_wrong_result_fails(root):
    results = root / "bench/results/device/checks.json"
    for number, (right, wrong) in enumerate(((20, 0), (29, 1))):
        folder = root / f"logs{number}"
        folder.mkdir()
        checked(folder, "checks-0.jsonl", "mma.forward", right, wrong)
        assert run(root, "record.py", "checks", results, folder).returncode == wrong
    (only,) = json.loads(results.read_text())["runs"]
    assert (only["right"], only["wrong"]) == (29, 1)
    assert run(root, "verified.py").returncode == 0
    assert "29, **1 wrong**" in (root / "docs/verified.md").read_text()


def test_a_tool_that_did_not_come_to_its_end_proves_nothing(root):
    folder, results = root / "logs", root / "bench/results/device/checks.json"
    folder.mkdir()
    checked(folder, "mma.forward-memcheck.jsonl", "mma.forward", 7)
    (folder / "mma.forward-memcheck.log").write_text("7 passed, 0 failed\n")
    assert run(root, "record.py", "checks", results, folder).returncode == 1
    assert not results.exists()


def compiled(folder, number, failed=0, listed=20, key="0123456789abcdef"):
    path = folder / f"{number}.jsonl"
    line = {"architecture": "sm_80", "entry": "mma_backward", "key": key, "listed": listed, "compiled": 10, "failed": failed, "spilled": 2,
            "spill_bytes_max": 8 + number, "registers_max": 255}
    path.write_text(json.dumps(line) + "\n")
    return path


def record(root, *files, listed="sm_80 mma_backward 20 0123456789abcdef\n"):
    (root / "list").write_text(listed)
    done = run(root, "record.py", "compile", root / "list", *files)
    return done.returncode, run(root, "record.py", "known").stdout


def test_shares_of_a_group_add_up(root):
    assert record(root, *(compiled(root, number) for number in range(2))) == (0, "sm_80 mma_backward 20 0123456789abcdef\n")
    assert run(root, "verified.py").returncode == 0
    assert "| `mma_backward` | 20, 4 spill (most 9 bytes) |" in (root / "docs/verified.md").read_text()


def test_a_group_that_failed_or_is_not_whole_is_not_recorded(root):
    assert record(root, compiled(root, 0, failed=1), compiled(root, 1)) == (1, "")
    assert record(root, compiled(root, 0)) == (0, "")


def test_a_newer_key_replaces_the_older_and_what_is_not_listed_goes(root):
    record(root, compiled(root, 0, listed=10))
    assert record(root, compiled(root, 0, listed=10, key="00000000000000ff"))[1] == "sm_80 mma_backward 10 00000000000000ff\n"
    assert record(root, compiled(root, 0), listed="sm_80 mma_forward_d1024 3 1\n")[1] == ""


def test_entries_of_older_libraries_have_the_names_of_today(root):
    (root / "bench/results/compile").mkdir(parents=True)
    group = json.loads(compiled(root, 0, listed=10).read_text()) | {"entry": "hopper_wide_dq", "compiler": "", "commit": "", "date": ""}
    (root / "bench/results/compile/matrix.json").write_text(json.dumps({"groups": [group]}))
    assert run(root, "record.py", "known").stdout == "sm_80 hopper_backward_2pass_dq 10 0123456789abcdef\n"
    assert run(root, "verified.py").returncode == 0
    assert "| `hopper_backward_2pass_dq` | 10" in (root / "docs/verified.md").read_text()


FAULTS = {
    "a link": ("docs/a.md", "[page](missing.md)\n", "docs/a.md: there is no missing.md"),
    "a path": ("docs/a.md", "see `src/gpu/missing.cu`\n", "docs/a.md: there is no src/gpu/missing.cu"),
    "a file's name": ("README.md", "see `missing.cuh`\n", "README.md: there is no missing.cuh"),
    "a long line": ("src/README.md", "x " * 60 + "x\n", "src/README.md:1: 121 columns; at most 120"),
    "a result": ("bench/results/device/2026-01-01-speed.json", "{}\n", "2026-01-01-speed.json: no page and no script names it"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_not_there_is_a_fault(root, name):
    path, text, said = FAULTS[name]
    assert run(root, "check_docs.py").returncode == 0
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    done = run(root, "check_docs.py")
    assert done.returncode == 1
    assert said in done.stderr


def test_tables_images_and_targets_of_links_may_be_long(root):
    long = "x" * 120
    (root / "docs/a.md").write_text(f"| {long} |\n![{long}](https://a.org)\n[{'x' * 110}](https://{long})\n")
    assert run(root, "check_docs.py").returncode == 0


def test_two_results_for_one_question_are_a_fault(root):
    folder = root / "bench/results/device"
    folder.mkdir(parents=True)
    for name in ("2026-01-01-speed.json", "2026-01-02-speed.json"):
        (folder / name).write_text("{}\n")
    (root / "docs/a.md").write_text("`2026-01-01-speed.json` and `2026-01-02-speed.json`\n")
    done = run(root, "check_docs.py")
    assert done.returncode == 1
    assert "answers the question of" in done.stderr
