#!/usr/bin/env python3
"""check_wrappers.py: every wrapper of src/cuda/ptx has a stand-in and is compared with it on a device.

A wrapper is a function of src/cuda/ptx. Its stand-in is in tests/emulator/ptx, and tests/emulator/instruction_check.c names
it in the table that scripts/check_instructions.sh runs; a name there may end in "*".
"""

from __future__ import annotations

import fnmatch
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FUNCTION = re.compile(r"__device__\s+__forceinline__\s+[\w:<>&*\s]*?\b(\w+)\s*\(")


def expanded(text: str) -> set[str]:
    """Names of a text, with what its macros paste into them as patterns: wgmma_m64n##N##k16 is wgmma_m64n*k16."""
    pasted = re.sub(r"\s*##\s*\w+\s*##\s*", "*", text)
    return set(re.findall(r"[A-Za-z_][\w*]*", re.sub(r"\s*##\s*\w+", "*", pasted)))


def main() -> int:
    faults = []
    table = (ROOT / "tests/emulator/instruction_check.c").read_text(encoding="utf-8")
    tried = set(re.findall(r"[A-Za-z_][\w*]*", " ".join(re.findall(r'"([^"]*)"', table))))
    for path in sorted((ROOT / "src/cuda/ptx").glob("*.cuh")):
        if path.name == "types.cuh":
            continue
        stand_in = ROOT / "tests/emulator/ptx" / path.name
        names = expanded(stand_in.read_text(encoding="utf-8")) if stand_in.is_file() else set()
        for name in sorted(set(FUNCTION.findall(path.read_text(encoding="utf-8")))):
            if not any(fnmatch.fnmatchcase(name, known) for known in names if len(known) > 3):
                faults.append(f"{path.relative_to(ROOT)}: {name}() has no stand-in in tests/emulator/ptx/{path.name}")
            if not any(fnmatch.fnmatchcase(name, known) for known in tried if len(known) > 3):
                faults.append(f"{path.relative_to(ROOT)}: {name}() is not in the table of tests/emulator/instruction_check.c")
    print("\n".join(faults), end="\n" if faults else "")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
