#!/usr/bin/env python3
"""embed_texts.py: files as C strings under their names. Usage: embed_texts.py OUTPUT FILE..."""

from __future__ import annotations

import pathlib
import sys


def literal(text: str) -> str:
    lines = text.replace("\\", "\\\\").replace('"', '\\"').splitlines()
    return "\n".join(f'     "{line}\\n"' for line in lines) or '     ""'


def main() -> None:
    output, *paths = sys.argv[1:]
    lines = ["/* Made by embed_texts.py. */", '#include "text.h"', "const struct embedded_text embedded_texts[] = {"]
    for path in map(pathlib.Path, paths):
        name = f"ptx/{path.name}" if path.parent.name == "ptx" else path.name
        lines.append(f'    {{"{name}",\n{literal(path.read_text(encoding="utf-8"))}}},')
    lines += ["};", f"const int num_embedded_texts = {len(paths)};", ""]
    pathlib.Path(output).write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
