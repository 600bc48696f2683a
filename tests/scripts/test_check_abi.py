"""test_check_abi.py: scripts/check_abi.py finds what breaks a program, and passes what a newer library may have.

Each case is the public header with a change, and a library that defines what that header declares and nothing else."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = (ROOT / "include" / "flash_dmattn.h").read_text()
pytestmark = pytest.mark.skipif(not shutil.which("abidiff"), reason="abidiff is not here (Debian: abigail-tools)")

OPTIONS_END, PROBLEM_END = "} fdm_options;", r"    int8_t reserved\[(\d+)\]; +/\* 0 \*/\n} fdm_problem;"
RESERVED, WORDS = re.search(PROBLEM_END, HEADER)[0], int(re.search(PROBLEM_END, HEADER)[1])
BREAKS = {
    "a function is gone": [("FDM_API void fdm_shutdown(void);", "")],
    "a parameter is wider": [("fdm_setting_list(int32_t index", "fdm_setting_list(int64_t index")],
    "a parameter more": [("FDM_API void fdm_shutdown(void);", "FDM_API void fdm_shutdown(int32_t wait);")],
    "a result of another type": [("FDM_API void fdm_shutdown(void);", "FDM_API int32_t fdm_shutdown(void);")],
    "a field in the middle": [("    double softcap;            /* 0", "    double more, softcap;      /* 0")],
    "a field has another type": [("    double softcap;            /* 0", "    int64_t softcap;           /* 0")],
    "the same beside a field at the end": [("    double softcap;            /* 0", "    int64_t softcap;           /* 0"),
                                           (OPTIONS_END, "    int64_t more;\n" + OPTIONS_END)],
    "two fields change places": [("needs_dq, needs_dk, needs_dv;", "needs_dk, needs_dq, needs_dv;")],
    "a field is gone": [("    int64_t lse_without_sink;  ", "    /* ")],
    "a struct of fixed size grows": [(RESERVED, RESERVED.replace("}", "    int64_t more;\n}"))],
    "a struct of fixed size has a word more beside all reserved ones": [(RESERVED, "    int64_t more;\n" + RESERVED)],
    "a tensor grows": [("    uint64_t byte_offset;\n", "    uint64_t byte_offset, more;\n")],
    "an array in a plan is longer": [("    char choice[64];         /* the kernel", "    char choice[72];         /* the kernel")],
    "a status has another number": [("FDM_ERROR_REMOTE = 7 ", "FDM_ERROR_REMOTE = 8 ")],
}
MAY_COME = {  # and the numbers of new functions, and of new fields and enumerators
    "nothing": ([], 0, 0),
    "a function": ([("FDM_API void fdm_shutdown(void);", "FDM_API void fdm_shutdown(void);\nFDM_API void fdm_more(void);")], 1, 0),
    "a definition of what was a name": ([("struct fdm_timer fdm_timer;", "struct fdm_timer { int64_t clock; } fdm_timer;")], 0, 0),
    "a field at the end": ([(OPTIONS_END, "    int64_t more;\n" + OPTIONS_END)], 0, 1),
    "a reserved word": ([(RESERVED, "    int8_t more;\n" + RESERVED.replace(f"[{WORDS}]", f"[{WORDS - 1}]"))], 0, 1),
    "a status": ([("FDM_ERROR_REMOTE = 7 ", "FDM_ERROR_REMOTE = 7, FDM_ERROR_MORE = 8 ")], 0, 1),
}


def check(folder: pathlib.Path, changes: list[tuple[str, str]], soname: str = "libflash_dmattn.so.0") -> subprocess.CompletedProcess:
    text = HEADER
    for old, new in changes:
        assert text.count(old) == 1, f"the header has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    declared = re.findall(r"(?m)^(FDM_API [^;]*);", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))
    (folder / "flash_dmattn.h").write_text(text)
    (folder / "library.c").write_text('#include "flash_dmattn.h"\n' + "".join(f"{one} {{}}\n" for one in declared))
    library = folder / "library.so"
    subprocess.run(["cc", "-g", "-w", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", library, folder / "library.c"], check=True)
    return subprocess.run([sys.executable, ROOT / "scripts" / "check_abi.py", library, folder], capture_output=True, text=True)


@pytest.mark.parametrize("what", BREAKS)
def test_what_breaks_a_program_fails(tmp_path: pathlib.Path, what: str) -> None:
    found = check(tmp_path, BREAKS[what])
    assert found.returncode == 1, found.stdout
    assert "do not work with this one" in found.stderr


def test_another_soname_fails(tmp_path: pathlib.Path) -> None:
    assert "SONAME changed" in check(tmp_path, [], "libflash_dmattn.so.1").stderr


@pytest.mark.parametrize("what", MAY_COME)
def test_what_a_newer_library_may_have_passes(tmp_path: pathlib.Path, what: str) -> None:
    changes, functions, fields = MAY_COME[what]
    found = check(tmp_path, changes)
    assert found.returncode == 0, found.stderr
    assert f"new functions: {functions}, new fields and enumerators: {fields}" in found.stdout
