"""The checkers of the tree's laws find one planted violation of each, and say which."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
SOUND = {
    "src/base/error.h": "/* error.h: what went wrong. */\nint last_error(void);\n",
    "src/cuda/ptx/math.cuh": '/* math.cuh: instructions. */\ninline void f(int &x) { asm volatile("" : "+r"(x)); }\n',
    "src/contract/family.h": "/* family.h: what every family is. */\n",
    "src/families/mma/tile.cuh": '/* tile.cuh: tiles. */\n#include "cuda/ptx/math.cuh"\n',
    "src/families/mma/mma.cu": '/* mma.cu: a kernel. */\n#include "families/mma/tile.cuh"\n/* no asm here */\n',
    "src/families/hopper/hopper.cuh": "/* hopper.cuh: tiles. */\n",
    "cli/main.c": '/* main.c: a tool. */\n#include "system/system.h"\n',
    "src/gpu/visible.cuh": '/* visible.cuh: who sees whom. */\n#include "cuda/ptx/math.cuh"\n',
}
KERNEL = "src/families/mma/mma.cu"
HOST = "src/base/error.c"
HEAD = 'extern "C" __global__ void __launch_bounds__(THREADS, 1)\n    long_kernel(int n) {\n'
LONG_FUNCTION = HEAD + "    n++;\n" * 68 + "}\n"


def first_line(text: str) -> str:
    return "/* mma.cu: a kernel. */\n" + text


def host_text(text: str) -> str:
    return "/* error.c: what went wrong. */\n" + text


# What stands in a file instead, the checker, and what it says.
VIOLATIONS = {
    "first line of a kernel": (KERNEL, "int x;\n", "check_style.py", 'mma.cu:1: must start with "/* mma.cu: "'),
    "first line of a header": (
        "src/gpu/visible.cuh",
        "/* seen.cuh: who sees whom. */\n",
        "check_style.py",
        'visible.cuh:1: must start with "/* visible.cuh: "',
    ),
    "width": (KERNEL, first_line("int " + "x" * 120 + ";\n"), "check_style.py", "mma.cu:2: 125 columns; at most 120"),
    "width of a comment": (
        HOST,
        host_text("/* " + "x" * 120 + " */\n"),
        "check_style.py",
        "126 columns; at most 120",
    ),
    "tab": (KERNEL, first_line("\tint x;\n"), "check_style.py", "mma.cu:2: tab"),
    "trailing blank": (KERNEL, first_line("int x; \n"), "check_style.py", "mma.cu:2: trailing blank"),
    "end of file": (KERNEL, first_line("int x;"), "check_style.py", "mma.cu: no newline at the end"),
    "function length": (
        KERNEL,
        first_line(LONG_FUNCTION),
        "check_style.py",
        "mma.cu:2: long_kernel() has 71 lines; at most 70",
    ),
    "method length": (
        KERNEL,
        first_line("struct role : base {\n    int x;\n    __device__ void run() {\n" + "        x++;\n" * 69 + "    }\n};\n"),
        "check_style.py",
        "mma.cu:4: run() has 71 lines; at most 70",
    ),
    "file length": (KERNEL, first_line("int x;\n" * 700), "check_style.py", "mma.cu: 701 lines; at most 700"),
    "asm": (
        KERNEL,
        first_line('void f() { asm volatile(""); }\n'),
        "check_style.py",
        "mma.cu:2: asm; only src/cuda/ptx",
    ),
    "first line of a script": (
        "scripts/run.sh",
        "#!/bin/sh\nexit 0\n",
        "check_style.py",
        'must start with "# run.sh: "',
    ),
    "first line of Python": ("scripts/run.py", "import sys\n", "check_style.py", "must start with a docstring"),
    "function length in C": (
        HOST,
        host_text("int f(int n) {\n" + "    n++;\n" * 69 + "}\n"),
        "check_style.py",
        "error.c:2: f() has 71 lines; at most 70",
    ),
    "file length in C": (HOST, host_text("int x;\n" * 600), "check_style.py", "error.c: 601 lines; at most 600"),
    "environment": (
        HOST,
        host_text('const char *f(void) { return getenv("F"); }\n'),
        "check_style.py",
        "error.c: reads the environment; only src/base/settings.c may",
    ),
    "printing": (
        HOST,
        host_text('void f(void) { puts("f"); }\n'),
        "check_style.py",
        "error.c: prints in 1 places; the library prints in 0 there",
    ),
    "end of the process": (
        HOST,
        host_text("void f(void) { abort(); }\n"),
        "check_style.py",
        "error.c: ends the process",
    ),
    "file name": (
        "src/gpu/tile.cuh",
        "/* tile.cuh: tiles. */\n",
        "check_style.py",
        "src/families/mma/tile.cuh has the same file name",
    ),
    "another family": (
        KERNEL,
        first_line('#include "families/hopper/hopper.cuh"\n'),
        "check_includes.py",
        "src/families/mma may not include src/families/hopper",
    ),
    "a family above gpu": (
        "src/gpu/visible.cuh",
        '/* visible.cuh: who sees whom. */\n#    include "families/mma/tile.cuh"\n',
        "check_includes.py",
        "src/gpu may not include src/families/mma",
    ),
    "up from cuda": (
        "src/cuda/ptx/math.cuh",
        '/* math.cuh: instructions. */\n#include "gpu/visible.cuh"\n',
        "check_includes.py",
        "src/cuda may not include src/gpu",
    ),
    "no path from src": (
        KERNEL,
        first_line('#include "tile.cuh"\n'),
        "check_includes.py",
        "includes tile.cuh: it is no path from src/",
    ),
    "a tool below the public header": (
        "cli/main.c",
        '/* main.c: a tool. */\n#include "base/error.h"\n',
        "check_includes.py",
        "cli/main.c: includes base/error.h; outside src/ only the public header may be included",
    ),
    "Python on the lowest floor": (
        "python/native.c",
        '/* native.c: an extension. */\n#include "system/system.h"\n',
        "check_includes.py",
        "python/native.c: includes system/system.h; outside src/ only the public header may be included",
    ),
    "folder without a row": (
        "src/novel/novel.cuh",
        '/* novel.cuh: new. */\n#include "base/error.h"\n',
        "check_includes.py",
        "check_includes.py has no row for src/novel",
    ),
}


def run(checker: str, tree: pathlib.Path) -> tuple[int, str]:
    root = ["--root", str(tree)] if checker == "check_style.py" else [str(tree)]
    result = subprocess.run([sys.executable, SCRIPTS / checker, *root], capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for path, text in SOUND.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.mark.parametrize("checker", ["check_style.py", "check_includes.py"])
def test_sound_tree(tree: pathlib.Path, checker: str) -> None:
    assert run(checker, tree)[0] == 0, run(checker, tree)[1]


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation(tree: pathlib.Path, name: str) -> None:
    path, text, checker, message = VIOLATIONS[name]
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(text)
    status, said = run(checker, tree)
    assert status == 1
    assert message in said
    assert said.count("\n") == 1, "one violation, one line"


def test_textbook_exceptions_exist() -> None:
    """A name that no longer needs its exception leaves the list."""
    sys.path.insert(0, str(SCRIPTS))
    import check_style  # noqa: PLC0415

    for path, limit in check_style.LONG_FILES.items():
        lines = (check_style.ROOT / path).read_text().count("\n")
        ordinary = check_style.CUDA_FILE_LINES if path.endswith((".cu", ".cuh")) else check_style.FILE_LINES
        assert ordinary < lines <= limit, path
