#!/usr/bin/env python3
"""check_includes.py: the dependency law. Includes point down the house, never up and never to a neighbour.

MAY_INCLUDE says, for each folder of src/, which others its files may include; C, CUDA C and their headers alike. Every
include is a path from src/. A family is one folder: no family includes another. The command line tool and Python see
the public header only, which must also compile alone, as C11 and as C++; the tool stands on the lowest floor too.
Usage: check_includes.py [ROOT]
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PUBLIC = "flash_dmattn.h"
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
SOURCES = {".c", ".h", ".cu", ".cuh"}

# Folder of src/ ("." is src/ itself) -> folders that its files may include besides their own.
MAY_INCLUDE = {
    "system": set(),
    "base": {"system"},
    "cuda": {"base", "system"},
    "problem": {"base"},
    "device": {"base", "cuda", "system"},
    "contract": {"base", "problem"},
    "gpu": {"base", "cuda", "problem", "device", "contract"},
    "masks": {"base", "cuda", "problem", "gpu"},
    "families": {"contract"},
    "families/reference": {"base", "problem", "contract", "families"},
    "families/cpu": {"base", "problem", "device", "contract", "families"},
    "families/blackwell": {"base", "cuda", "problem", "device", "contract", "families", "gpu"},
    "families/hopper": {"base", "cuda", "problem", "device", "contract", "families", "gpu"},
    "families/mma": {"base", "cuda", "problem", "device", "contract", "families", "gpu"},
    "companions": {"base", "cuda", "problem", "device", "tuning"},
    "tuning": {"base", "cuda", "device", "system"},
    "plan": {"base", "cuda", "problem", "device", "contract", "families", "tuning"},
    "tuner": {"base", "cuda", "system", "device", "problem", "contract", "plan", "tuning", "companions"},
    "parallel": {"base", "cuda", "system", "device", "problem"},
    ".": {"base", "cuda", "problem", "device", "contract", "gpu", "plan", "tuner", "tuning"},
}
# Headers without state or knowledge of how attention is computed that the command line tool may share; they may include each other.
SHARED_LEAVES = {"base/elements.h", "base/half.h", "base/json_reader.h", "base/kernel_name.h"}


def folder_of(path: str) -> str:
    """The row of MAY_INCLUDE that a path below src/ falls under; subfolders belong to their folder or family."""
    parts = pathlib.PurePosixPath(path).parts[:-1]
    if parts[:1] == ("families",):
        return "/".join(parts[:2])
    return parts[0] if parts else "."


def law_fault(source: str, target: str) -> str | None:
    """Why the file `source` may not include `target`, both paths below src/; None when it may."""
    own, other = folder_of(source), folder_of(target)
    if own not in MAY_INCLUDE:
        return f"check_includes.py has no row for src/{own}"
    if own == other or other in MAY_INCLUDE[own]:
        return None
    return f"src/{own} may not include src/{other}"


def source_faults(root: pathlib.Path) -> list[str]:
    faults = []
    for path in sorted(p for p in (root / "src").rglob("*") if p.suffix in SOURCES):
        source = path.relative_to(root / "src").as_posix()
        for name in INCLUDE.findall(path.read_text()):
            if name == PUBLIC:
                continue
            fault = law_fault(source, name) if (root / "src" / name).is_file() else "it is no path from src/"
            if fault:
                faults.append(f"src/{source}: includes {name}: {fault}")
    return faults


def tool_faults(root: pathlib.Path) -> list[str]:
    faults = []
    for folder in ("cli", "python"):
        for path in sorted((root / folder).rglob("*.[ch]")):
            for name in INCLUDE.findall(path.read_text()):
                shared = name in SHARED_LEAVES or (folder == "cli" and name.startswith("system/"))
                if name != PUBLIC and not shared and not (path.parent / name).is_file():
                    faults.append(
                        f"{path.relative_to(root)}: includes {name}; outside src/ only the public header may be included"
                    )
    for leaf in sorted(SHARED_LEAVES):
        for name in INCLUDE.findall((root / "src" / leaf).read_text()) if (root / "src" / leaf).is_file() else []:
            if name != PUBLIC and name not in SHARED_LEAVES:
                faults.append(f"src/{leaf}: includes {name}; a header shared with the tools may include nothing of ours")
    return faults


def public_header_faults(root: pathlib.Path) -> list[str]:
    """The header alone, without warnings, in both languages."""
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        for compiler, suffix, standard in (("cc", "c", "c11"), ("c++", "cc", "c++11")):
            source = pathlib.Path(folder) / f"alone.{suffix}"
            source.write_text(f'#include "{PUBLIC}"\n')
            command = [compiler, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
            run = subprocess.run(
                [*command, f"-I{root / 'include'}", str(source)], capture_output=True, text=True, check=False
            )
            if run.returncode:
                faults.append(f"include/{PUBLIC}: does not compile alone as {standard}:\n{run.stderr}")
    return faults


def main(arguments: list[str]) -> int:
    root = pathlib.Path(arguments[0]).resolve() if arguments else ROOT
    faults = source_faults(root) + tool_faults(root) + ([] if arguments else public_header_faults(root))
    print("\n".join(faults), file=sys.stderr) if faults else print("includes: the dependency law holds")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
