"""scripts/test.sh runs every stage whatever failed before, and its last lines say what failed, what was not covered and how
long each stage took; .ci/run ends with a table; scripts/run.sh builds the tool alone; tests are built with cmocka or not at all."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
ROOT = SCRIPTS.parent
PROGRAMS = pathlib.Path(sys.executable).parent

MESON_LOG = [
    {"name": "checks - flash-dmattn:checks-1", "result": "OK", "stdout": "x\nnot covered on this machine: cpu.forward.amx\n"},
    {"name": "checks - flash-dmattn:checks-2", "result": "FAIL", "stdout": "not covered on this machine: cpu.forward.amx\n"},
    {"name": "device - flash-dmattn:hopper-probe", "result": "SKIP", "stdout": "begin\nnot covered: no CUDA driver can be opened\n"},
    {"name": "device - flash-dmattn:gemm-check", "result": "SKIP", "stdout": "not covered: no CUDA driver can be opened\n"},
    {"name": "flash-dmattn:slow", "result": "TIMEOUT", "stdout": "", "stderr": ""},
    {"name": "flash-dmattn:silent", "result": "SKIP"},
]
CASE = '<testcase classname="tests.python.test_{0}" name="test_{1}">{2}</testcase>'
SKIPPED = '<skipped type="pytest.skip" message="no CUDA device">x</skipped>'
PYTEST_REPORT = "<testsuites><testsuite>{}</testsuite></testsuites>".format(
    CASE.format("cuda", "a", SKIPPED) + CASE.format("cuda", "b", SKIPPED) + CASE.format("forward", "c", "<failure/>")
    + CASE.format("forward", "d", '<skipped type="pytest.xfail" message="known"/>') + CASE.format("forward", "e", ""))
QUIET_REPORT = "<testsuites><testsuite>{}</testsuite></testsuites>".format(CASE.format("cli", "a", ""))

STUB = """#!/usr/bin/env bash
# {name}
echo "{name} $*" >>calls
case "{name} $*" in
{cases}
esac
"""


def executable(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def tree(tmp_path):
    """The scripts among programs that only say that they were called, of which `failing` fail."""

    def make(*failing: str) -> pathlib.Path:
        for name in ("test.sh", "run.sh", "stages.sh", "draw.sh", "configure.sh", "test_summary.py"):
            (tmp_path / "scripts").mkdir(exist_ok=True)
            shutil.copy(SCRIPTS / name, tmp_path / "scripts" / name)
        (tmp_path / "log.json").write_text("".join(json.dumps(row) + "\n" for row in MESON_LOG))
        (tmp_path / "python.xml").write_text(PYTEST_REPORT)
        cases = "".join(f'    *"{words}"*) exit 3 ;;\n' for words in failing)
        made = {"meson": "    *setup*) mkdir -p build; touch build/build.ninja ;;\n    *test*) cp log.json build/meson-logs/testlog.json ;;\n",
                "python": "    *tests/python*) cp python.xml build/meson-logs/pytest.xml ;;\n"}
        for name in ("meson", "ninja", "pip", "python"):
            executable(tmp_path / ".venv" / "bin" / name, STUB.format(name=name, cases=cases + made.get(name, "")))
        for name in ("scripts/setup.sh", "scripts/test_install.sh", "build/fdm"):
            said = '    *test_install.sh*) echo "not covered: CMake" ;;\n'
            executable(tmp_path / name, STUB.format(name=name, cases=cases + said))
        return tmp_path

    return make


def run(tree: pathlib.Path, script: str):
    done = subprocess.run(["bash", f"scripts/{script}"], cwd=tree, capture_output=True, text=True, timeout=60,
                          env={"PATH": os.environ["PATH"], "TMPDIR": str(tree)})
    return done, (tree / "calls").read_text()


STAGES = {"set-up": "setup.sh test", "build": "ninja -C build", "C tests": "meson test", "package": "pip install",
          "Python tests": "tests/python tests/cli tests/scripts", "install test": "test_install.sh"}


@pytest.mark.parametrize("name", STAGES)
def test_one_stage_that_fails_ends_nothing(tree, name):
    """The reports say nothing of failures here."""
    folder = tree(STAGES[name])
    (folder / "log.json").write_text("")
    (folder / "python.xml").write_text(QUIET_REPORT)
    done, calls = run(folder, "test.sh")
    assert done.returncode == 1
    assert all(words in calls for words in STAGES.values())
    reported = name in ("C tests", "Python tests")
    assert done.stdout.splitlines()[-1] == f"failed: {name}" + (" (there is no report)" if reported else "")
    assert f"== {name}: failed after " in done.stdout
    assert all(f"{each} " in done.stdout.splitlines()[-2] for each in STAGES) and " s in all" in done.stdout


def test_the_summary_counts_and_names(tree):
    done, _ = run(tree(), "test.sh")
    assert done.returncode == 1
    lines = done.stdout[done.stdout.index("not covered") :].splitlines()
    expected = ["not covered: 2 skipped of the C tests: no CUDA driver can be opened (hopper-probe, gemm-check)",
                "not covered: 1 skipped of the C tests: no reason is given (silent)",
                "not covered: a part of checks-1, checks-2: cpu.forward.amx",
                "not covered: 2 skipped of the Python tests: no CUDA device (test_cuda)",
                "not covered: a part of the install test: CMake"]
    assert [line for line in lines if line.startswith("not covered: ")][1:6] == expected  # after the stage's own line
    assert lines[-1] == "failed: C tests (checks-2, slow); Python tests (tests/python/test_forward.py::test_c)"
    assert lines[-2].startswith("took: set-up 0 s, build ")


def test_nothing_failed(tree):
    folder = tree()
    (folder / "log.json").write_text(json.dumps(MESON_LOG[0]))
    (folder / "python.xml").write_text(QUIET_REPORT)
    done, _ = run(folder, "test.sh")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "nothing failed"
    assert not [path for path in folder.iterdir() if path.name.startswith("tmp.")], "temporary files are removed"


def test_old_reports_do_not_count(tree):
    folder = tree("meson test")
    (folder / "build" / "meson-logs").mkdir()
    shutil.copy(folder / "log.json", folder / "build" / "meson-logs" / "testlog.json")
    done, _ = run(folder, "test.sh")
    assert "failed: C tests (there is no report); Python tests" in done.stdout


def test_run_builds_the_tool_alone_and_says_each_step(tree):
    folder = tree()
    done, calls = run(folder, "run.sh")
    assert done.returncode == 0, done.stderr
    assert calls.splitlines() == ["scripts/setup.sh build", "meson setup build", "ninja -C build --quiet fdm",
                                  "build/fdm attend examples/minilm/qkv.safetensors --causal --topk 64 --backward --check"]
    steps = [line.split(":")[0] for line in done.stdout.splitlines() if line.endswith(" s")]
    assert steps == ["== set-up", "== configure", "== build", "== run"]
    (folder / "calls").unlink()
    assert run(folder, "run.sh")[1].splitlines()[:2] == ["scripts/setup.sh build", "ninja -C build --quiet fdm"], "it is set up once"


def test_run_ends_where_a_step_fails(tree):
    done, calls = run(tree("ninja -C build"), "run.sh")
    assert done.returncode == 3 and "attend" not in calls and "== build: failed after" in done.stdout


@pytest.mark.parametrize("failing", ["", "make lint", "fuzz.sh"])
def test_ci_runs_every_step_and_ends_with_a_table(tree, failing):
    folder = tree(*[failing] if failing else [])
    cases = f'    *"{failing}"*) exit 3 ;;\n' if failing else ""
    for name in ("test_long.sh", "sanitize.sh", "compile_changed.sh", "fuzz.sh", "qemu-neon.sh", "site.sh",
                 "wheels.sh"):
        executable(folder / "scripts" / name, STUB.format(name=name, cases=cases))
    executable(folder / "bin" / "make", STUB.format(name="make", cases=cases))
    executable(folder / ".ci" / "run", (ROOT / ".ci" / "run").read_text())
    done = subprocess.run([folder / ".ci" / "run"], capture_output=True, text=True, timeout=60,
                          env={"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(folder)})
    table = done.stdout[done.stdout.index("\nstep ") :].splitlines()[2:]
    assert len(table) == len((folder / "calls").read_text().splitlines()) + 1 == 11
    failed = [line for line in table[:-1] if not line.endswith("  passed")]
    assert len(failed) == done.returncode == bool(failing) and all(line.endswith("  failed, exit code 3") for line in failed)
    assert re.fullmatch(r"all +\d+  " + ("1 failed" if failing else "passed"), table[-1])


# ---- what a run draws ----

# Each stub answers or ends without a word; git is one that fails, so a script that asks for the commit fails too.
DRAWING = {"compile_changed.sh": r"--share (\d+)/384", "test_long.sh": r"meson test .*timeout-multiplier 4 (.*)"}


@pytest.fixture
def drawing(tmp_path):
    """Runs a script that draws at an hour since 1970; the part that it took, and what it printed."""
    for name in (*DRAWING, "draw.sh"):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        shutil.copy(SCRIPTS / name, tmp_path / "scripts" / name)
    tests = "".join(f"echo 'long - flash-dmattn:test-{n}';" for n in range(24))
    for name, cases in {"git": "*) exit 3 ;;", "meson": f'*" --list "*) {tests} ;;', "python3": "", "ninja": "", "date": "*) echo $NOW ;;"}.items():
        executable(tmp_path / ".venv" / "bin" / name, STUB.format(name=name, cases=cases))
    for name in ("build/tests/fdm-checks", "scripts/configure.sh"):
        executable(tmp_path / name, STUB.format(name=name, cases=""))

    def run_at(hour: int, command: str) -> tuple[str, str]:
        (tmp_path / "calls").unlink(missing_ok=True)
        environment = {"PATH": f"{tmp_path / '.venv' / 'bin'}:{os.environ['PATH']}", "NOW": str(hour * 3600 + 1800), "TMPDIR": str(tmp_path)}
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0, done.stderr
        script = next(name for name in DRAWING if name in command)
        return re.search(DRAWING[script], (tmp_path / "calls").read_text()).group(1), done.stdout

    return run_at


@pytest.mark.parametrize("command", ["scripts/compile_changed.sh 7", "scripts/test_long.sh 6"])
def test_the_hour_draws_and_its_draw_can_be_repeated(drawing, command):
    parts = {hour: drawing(hour, f"bash {command}") for hour in range(495000, 495010)}
    assert len({part for part, _ in parts.values()}) > 3, "other hours draw other parts"
    for hour in (495000, 495003):
        part, said = parts[hour]
        again = re.search(r"the same again: (FDM_CHECK_SEED=\d+) (.*)", said)
        assert again.group(2) == command
        assert drawing(495009, f"{again.group(1)} bash {again.group(2)}")[0] == part


# ---- options of the build ----


@pytest.fixture
def configure(tmp_path):
    """Meson on a project that demands cmocka as the tree does. Its PATH has a compiler and Ninja, no pkg-config or CMake."""
    for name in ("cc", "as", "ld", "ar", "ninja"):
        where = shutil.which(name, path=f"{PROGRAMS}:{os.environ['PATH']}")
        executable(tmp_path / "bin" / name, f'#!/bin/sh\n# {name}\nexec {where} "$@"\n')
    text = (ROOT / "tests" / "meson.build").read_text()
    demand = text[text.index("# Without it more than half") : text.index("if get_option('tests') and cmocka_dep.found()")]
    shutil.copy(ROOT / "meson.options", tmp_path / "meson.options")

    def run_meson(*options: str, library: str = "cmocka"):
        named = demand
        for call in ("dependency", "find_library"):
            assert f"{call}('cmocka'" in demand
            named = named.replace(f"{call}('cmocka'", f"{call}('{library}'")
        (tmp_path / "meson.build").write_text(f"project('part', 'c')\ncc = meson.get_compiler('c')\n{named}")
        return subprocess.run([sys.executable, PROGRAMS / "meson", "setup", tmp_path / "build", tmp_path, *options],
                              capture_output=True, text=True, timeout=120, env={"PATH": str(tmp_path / "bin")})

    return run_meson


@pytest.mark.skipif(not pathlib.Path("/usr/include/cmocka.h").exists(), reason="cmocka is not installed")
def test_cmocka_is_found_without_pkg_config(configure):
    done = configure("-Dtests=true")
    assert done.returncode == 0 and "Library cmocka found: YES" in done.stdout, done.stdout


def test_tests_without_cmocka_are_an_error(configure):
    done = configure("-Dtests=true", library="in_no_folder")
    assert done.returncode != 0
    assert "tests need cmocka, which is not found: install it (Debian: libcmocka-dev" in done.stdout + done.stderr


@pytest.mark.parametrize("options", [[], ["-Dtests=false"], ["-Dtests=true", "-Dcmocka=disabled"]])
def test_who_builds_no_tests_needs_no_cmocka(configure, options):
    done = configure(*options, library="in_no_folder")
    assert done.returncode == 0 and "cmocka found" not in done.stdout, done.stdout


def test_wheels_are_built_without_tests():
    assert '"-Dtests=false"' in (ROOT / "pyproject.toml").read_text()
    assert "need pkg-config" in (SCRIPTS / "setup.sh").read_text()
