"""mutate.py finds each line once, changes it alone, and tells a mutation that escapes from one that is caught."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import mutate  # noqa: E402
from mutations import MUTATIONS, Mutation  # noqa: E402

TEXT = "int twice(int x) {\n    return 2 * x;\n}\nint same(int x) {\n    return x;\n}\nint again(int x) {\n    return x;\n}\n"


def mutation(old, new="return 3 * x;", file="a.c"):
    return Mutation("a kind", file, old, new, "test_of_a")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    (tmp_path / "a.c").write_text(TEXT)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/meson.build").write_text("test('test_of_a', executable('test_of_a', 'a.c'))\n")
    monkeypatch.setattr(mutate, "TREE", tmp_path)
    return tmp_path


@pytest.mark.parametrize("each, words", [
    (mutation("return 2 * x;"), None),
    (mutation("return 4 * x;"), "has the line 0 times"),
    (mutation("return x;"), "has the line 2 times"),
    (mutation("return 2 * x;", file="b.c"), "has the line 0 times"),
    (mutation("return 2 * x;", "return 2 * x;"), "the new line is the old one"),
    (mutation("return 2 * x;")._replace(test="test_of_b"), "no test is called test_of_b"),
])
def test_a_line_that_is_not_there_once_is_an_error(tree, monkeypatch, each, words):
    monkeypatch.setattr(mutate, "MUTATIONS", [each])
    faults = mutate.faults_of_list(tree)
    assert [words in fault for fault in faults] == ([True] if words else [])


def test_one_line_changes_and_keeps_its_place(tree):
    mutate.mutate(tree, mutation("return 2 * x;"))
    assert (tree / "a.c").read_text() == TEXT.replace("2 * x", "3 * x")


@pytest.mark.parametrize("checks, compiles, result", [("2 \\* x", True, "failed"), ("int", True, "escaped"), ("int", False, "does not compile: no")])
def test_caught_and_escaped(tree, monkeypatch, checks, compiles, result):
    """The test of a tree that holds a word: it fails where the mutation takes the word away."""
    done = subprocess.CompletedProcess([], 0 if compiles else 1, stdout="no")
    monkeypatch.setattr(mutate, "build", lambda tests: done)
    monkeypatch.setattr(mutate, "BUILD", tree)
    test = {"command": ["grep", "-q", checks, str(tree / "a.c")], "env": {}, "files": []}
    assert mutate.try_mutation(mutation("return 2 * x;"), {"test_of_a": test}) == result
    assert (tree / "a.c").read_text() == TEXT


def test_the_list_fits_the_tree():
    assert mutate.faults_of_list(ROOT) == []
    assert len(MUTATIONS) >= 40 and all((ROOT / each.file).suffix in (".c", ".h") for each in MUTATIONS)
