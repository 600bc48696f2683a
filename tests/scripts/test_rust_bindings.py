"""scripts/rust_bindings.py notices what changes in the header, and refuses what it does not understand."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import rust_bindings  # noqa: E402


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the script on the header with one text in place of another, for the files of the real one."""

    def run_on(old: str = "", new: str = "") -> int:
        text = (SCRIPTS.parent / "include/flash_dmattn.h").read_text()
        assert old in text
        header = tmp_path / "flash_dmattn.h"
        header.write_text(text.replace(old, new, 1))
        monkeypatch.setattr(rust_bindings, "HEADER", header)
        return rust_bindings.main(["--check"])

    return run_on


CHANGES = {
    "a value": ("FDM_INT32 = 5", "FDM_INT32 = 6", ["bindings.rs", "layout.rs"]),
    "a member": ("    fdm_tensor *dsink;", "    fdm_tensor *dsink, *more;", ["bindings.rs", "layout.rs"]),
    "a type": ("double softcap; ", "int64_t softcap; ", ["bindings.rs"]),
    "a length": ("FDM_PLAN_PARAMETERS = 16", "FDM_PLAN_PARAMETERS = 17", ["bindings.rs", "layout.rs"]),
    "a parameter": ("fdm_synchronize(fdm_device_id device)", "fdm_synchronize(int32_t device)", ["bindings.rs"]),
    "a default": ("options.alpha = 1;", "options.alpha = 2;", ["bindings.rs"]),
    "a version": ('"0.1.0"\n', '"0.1.1"\n', ["bindings.rs"]),
}


def test_the_crate_has_the_header(run):
    assert run() == 0


@pytest.mark.parametrize("old, new, files", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(run, capsys, old, new, files):
    assert run(old, new) == 1
    said = capsys.readouterr().err
    assert [line.split(" ")[0].rpartition("/")[2] for line in said.splitlines()] == files


UNKNOWN = {
    "a bit field": ("int32_t present;", "int32_t present : 1;"),
    "a union": ("typedef struct fdm_launch {", "typedef union fdm_launch {"),
    "an array of arrays": ("char name[64];", "char name[64][2];"),
    "a declaration without FDM_API": ("FDM_API void fdm_shutdown", "void fdm_shutdown"),
    "a computed default": ("options.alpha = 1;", "options.alpha = 1 + 1;"),
}


@pytest.mark.parametrize("old, new", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_understood_is_an_error(run, old, new):
    with pytest.raises(SystemExit, match="rust_bindings.py: '.*' .*is not understood"):
        run(old, new)


def test_the_compiler_refuses_a_prototype_that_was_read_wrongly(run, monkeypatch):
    understood = rust_bindings.parse

    def wrong(text: str):
        header = understood(text)
        first = header.functions[0]._replace(base="void")
        return header._replace(functions=[first, *header.functions[1:]])

    monkeypatch.setattr(rust_bindings, "parse", wrong)
    with pytest.raises(subprocess.CalledProcessError):
        run()
