"""embed_sources.py: a program's closure, a part of the cache's keys, changes with every text that it includes, alone."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = {
    "a/program.cu": '#include "b/near.cuh"\nint main_of_a;\n',
    "b/near.cuh": '#include "c/far.cuh"\n#define ARCH_SPECIFIC 1\n',
    "c/far.cuh": "int far;\n",
    "c/other.cuh": "int other;\n",
    "c/beside.cu": '#include "c/other.cuh"\n',
}


def closures(tmp_path, changed=None):
    """Of each program the two halves and whether it is for one architecture; of FILES with some texts changed."""
    for name, text in (FILES | (changed or {})).items():
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    output = tmp_path / "sources.c"
    subprocess.run([sys.executable, ROOT / "scripts/embed_sources.py", tmp_path / "src", output], check=True)
    found = re.findall(r'\{"([^"]+\.cu)",.*?\{(\d+)ull, (\d+)ull\}, (\d)\}', output.read_text(), flags=re.DOTALL)
    return {name: (int(first), int(second), int(specific)) for name, first, second, specific in found}


def test_a_program_has_its_own_closure(tmp_path):
    before = closures(tmp_path)
    assert set(before) == {"a/program.cu", "c/beside.cu"}
    assert before["a/program.cu"][2] == 1 and before["c/beside.cu"][2] == 0
    assert before["a/program.cu"][0] != before["c/beside.cu"][0]


@pytest.mark.parametrize("name", ["a/program.cu", "b/near.cuh", "c/far.cuh"])
def test_each_text_that_is_included_changes_it(tmp_path, name):
    before = closures(tmp_path)
    after = closures(tmp_path, {name: FILES[name] + "\n"})
    assert before["a/program.cu"][0] != after["a/program.cu"][0] and before["a/program.cu"][1] != after["a/program.cu"][1]
    assert before["c/beside.cu"] == after["c/beside.cu"]


def test_texts_that_change_places_change_it(tmp_path):
    before = closures(tmp_path)
    after = closures(tmp_path, {"b/near.cuh": FILES["b/near.cuh"] + "int far;\n", "c/far.cuh": ""})
    assert before["a/program.cu"][:2] != after["a/program.cu"][:2]


def test_other_texts_do_not(tmp_path):
    assert closures(tmp_path)["a/program.cu"] == closures(tmp_path, {"c/other.cuh": "int changed;\n"})["a/program.cu"]
