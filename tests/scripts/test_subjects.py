"""scripts/check_subjects.py finds each subject of a commit that breaks the rule, and reads no commit before its base."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

CHECKER = pathlib.Path(__file__).resolve().parents[2] / "scripts/check_subjects.py"
RIGHT = ["Seed the draws of a case by its number", "Name kernels", "Say " + "x" * 68]
WRONG = {
    "Say " + "x" * 69: "has 73 columns; at most 72",
    "name kernels": 'begins with "name"; the first word is a verb with an upper-case letter',
    "API: name kernels": 'begins with "API:"; the first word is a verb with an upper-case letter',
    "Named kernels": 'begins with "Named"; the verb stands in the imperative',
    "Naming kernels": 'begins with "Naming"; the verb stands in the imperative',
    "Name kernels; count them": "has a semicolon; a commit is one thing",
    "Name kernels.": "ends with a full stop",
}


@pytest.fixture
def commit(tmp_path):
    """Adds an empty commit to a repository, whose first one breaks the rule; the function returns its hash."""
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True,
                              env=os.environ | names)
        return done.stdout.strip()

    def add(subject: str) -> str:
        git("commit", "-q", "--allow-empty", "-m", subject)
        return git("rev-parse", "--short", "HEAD")

    git("init", "-q")
    add("before the rule;")
    return add


def run(folder: pathlib.Path, *base: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, CHECKER, *base], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_right_subjects_pass(commit, tmp_path):
    base = commit("first.")
    for subject in RIGHT:
        commit(subject)
    assert run(tmp_path, base) == (0, f"subjects: {len(RIGHT)} keep the rule\n")


@pytest.mark.parametrize("subject", WRONG)
def test_a_wrong_subject_is_found(commit, tmp_path, subject):
    base = commit("first.")
    wrong = commit(subject)
    commit(RIGHT[0])
    assert run(tmp_path, base) == (1, f"commit {wrong}: the subject {WRONG[subject]}\n")


def test_a_history_without_the_base_passes_and_says_so(commit, tmp_path):
    commit("Named kernels.")
    code, said = run(tmp_path)
    assert code == 0 and said.startswith("subjects: not checked, commit 6f7adab")
