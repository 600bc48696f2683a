#!/usr/bin/env python3
"""check_includes.py: the dependency law. Includes point down the house, never up and never to a neighbour family.

    cli, python          the public header, and nothing else of the library
    attention            (4) the public entries
    plan, families.c     (3) the plan value and the list of families
    families/<name>      (2) one folder each; no family includes another
    mask, device         (1)
    problem, tensor      (1)
    settings, error, ... (0) no knowledge of attention

The public header must also compile alone, as C11 and as C++.
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

# Stem of a file directly under src/ -> floor. A file that is not here is an error: say where it lives.
FLOORS = {
    **dict.fromkeys(("settings", "error", "memory", "half", "json_reader", "hash", "clock"), 0),
    **dict.fromkeys(("tensor", "problem", "arch", "device", "device_memory", "device_table", "merge", "occupancy"), 1),
    "family": 2,
    **dict.fromkeys(("plan", "plan_json", "families", "resources"), 3),
    "attention": 4,
}
FOLDER_FLOORS = {"cuda": 0, "mask": 1, "families": 2}

# Includes against the law, each with the reason why it stands.
EXCEPTIONS = {
    ("src/device.c", "src/families/cpu/isa.h"): "a CPU's instruction set is a fact of the device",
    ("src/device.c", "src/families/cpu/threads.h"): "the number of usable processors is a fact of the device",
}
# Headers without state or knowledge of attention that the command line tool and the tests' tools may share.
SHARED_LEAVES = {"src/half.h", "src/json_reader.h"}


def floor_of(path: str) -> int | None:
    """Floor of a path below src/, or None when it has none."""
    parts = pathlib.PurePosixPath(path).parts
    if len(parts) > 2:
        return FOLDER_FLOORS.get(parts[1])
    return FLOORS.get(pathlib.PurePosixPath(path).stem)


def family_of(path: str) -> str | None:
    parts = pathlib.PurePosixPath(path).parts
    return parts[2] if parts[:2] == ("src", "families") and len(parts) > 3 else None


def resolve(source: pathlib.Path, name: str) -> str | None:
    """The included file relative to the root; the order in which the compiler looks."""
    for folder in (source.parent, ROOT / "src", ROOT / "include", ROOT / "cli"):
        if (folder / name).is_file():
            return (folder / name).resolve().relative_to(ROOT).as_posix()
    return None


def fault_of(source: str, target: str) -> str | None:
    """Why source may not include target, or None when it may."""
    if target == f"include/{PUBLIC}" or (source, target) in EXCEPTIONS:
        return None
    if not source.startswith("src/"):
        if target.split("/")[0] == source.split("/")[0] or target in SHARED_LEAVES:
            return None
        return "outside src/ only the public header may be included"
    if not target.startswith("src/"):
        return "the library may not include what is outside src/"
    above, below = floor_of(source), floor_of(target)
    if above is None or below is None:
        return f"{source if above is None else target} has no floor in check_includes.py"
    if below > above:
        return f"floor {above} may not include floor {below}"
    if family_of(source) and family_of(target) and family_of(source) != family_of(target):
        return "families may not include each other"
    return None


def check_tree() -> list[str]:
    faults = []
    used = set()
    for folder in ("src", "cli", "python"):
        for path in sorted((ROOT / folder).rglob("*.[ch]")):
            source = path.relative_to(ROOT).as_posix()
            for name in INCLUDE.findall(path.read_text()):
                target = resolve(path, name)
                if target is None:
                    faults.append(f"{source}: includes {name}, which is not in the tree")
                    continue
                used.add((source, target))
                fault = fault_of(source, target)
                if fault:
                    faults.append(f"{source}: includes {target}: {fault}")
    faults += [f"check_includes.py: exception {pair} is no longer needed" for pair in EXCEPTIONS if pair not in used]
    faults += [
        f"{leaf}: includes {name}; a header shared with the tools may include nothing of ours"
        for leaf in SHARED_LEAVES
        for name in INCLUDE.findall((ROOT / leaf).read_text())
    ]
    return faults


def check_public_header() -> list[str]:
    """The header alone, without warnings, in both languages."""
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        for compiler, suffix, standard in (("cc", "c", "c11"), ("c++", "cc", "c++11")):
            source = pathlib.Path(folder) / f"alone.{suffix}"
            source.write_text(f'#include "{PUBLIC}"\n')
            command = [compiler, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
            run = subprocess.run(
                [*command, f"-I{ROOT / 'include'}", str(source)], capture_output=True, text=True, check=False
            )
            if run.returncode:
                faults.append(f"include/{PUBLIC}: does not compile alone as {standard}:\n{run.stderr}")
    return faults


if __name__ == "__main__":
    found = check_tree() + check_public_header()
    print("\n".join(found), file=sys.stderr) if found else print("includes: the dependency law holds")
    sys.exit(bool(found))
