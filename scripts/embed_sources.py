#!/usr/bin/env python3
"""embed_sources.py: the kernels' sources as C data, so that the library compiles them where it runs.

Usage: embed_sources.py ROOT OUTPUT [--depfile FILE] [--programs FOLDER]
Every *.cu below ROOT, with what it includes by path below ROOT (quotes only), goes into OUTPUT as the tables of
src/cuda/sources.h. With --programs, it is every *.cu of that folder instead, under the folder's own name, and what they
include may lie beside them too.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import re

ARCH_SPECIFIC = re.compile(r"^#\s*define ARCH_SPECIFIC\b", re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def locate(roots: list[pathlib.Path], name: str) -> pathlib.Path | None:
    return next((root / name for root in roots if (root / name).is_file()), None)


def closure_of(roots: list[pathlib.Path], name: str, found: dict[str, str]) -> list[str]:
    """Names that `name` includes, directly or not, in order of discovery; texts are added to `found`."""
    order: list[str] = []
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current not in found:
            path = locate(roots, current)
            assert path is not None
            found[current] = path.read_text(encoding="utf-8")
        for included in INCLUDE.findall(found[current]):
            if locate(roots, included) is None:
                raise SystemExit(f'embed_sources: {current} includes "{included}", which is not below {roots[0]}')
            if included not in order:
                order.append(included)
                waiting.append(included)
    return order


def literal(text: str) -> str:
    """A C string, in pieces a line long: compilers limit the length of one literal, not of the joined one."""
    lines = text.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t").splitlines()
    return "\n".join(f'    "{line}\\n"' for line in lines) or '    ""'


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--depfile", type=pathlib.Path)
    parser.add_argument("--programs", type=pathlib.Path)
    options = parser.parse_args()
    found: dict[str, str] = {}
    folder = options.programs or options.root
    base = folder.parent if options.programs else options.root
    roots = [options.root, base]
    programs = sorted(path.relative_to(base).as_posix() for path in folder.rglob("*.cu"))
    closures = {name: closure_of(roots, name, found) for name in programs}
    names = sorted(found)
    lines = ["/* Made by scripts/embed_sources.py. */", '#include "cuda/sources.h"', ""]
    for index, name in enumerate(names):
        includes = ", ".join(str(names.index(included)) for included in closures.get(name, []))
        if includes:
            lines.append(f"static const int32_t includes_{index}[] = {{{includes}}};")
    lines.append("const struct cuda_source cuda_sources[] = {")
    for index, name in enumerate(names):
        digest = hashlib.blake2b(digest_size=16)
        for part in [name, *sorted(closures.get(name, []))]:
            digest.update(part.encode() + b"\0" + found[part].encode() + b"\0")
        halves = [int.from_bytes(digest.digest()[at : at + 8], "little") for at in (0, 8)]
        specific = any(ARCH_SPECIFIC.search(found[part]) for part in [name, *closures.get(name, [])])
        count = len(closures.get(name, []))
        lines += [
            f'    {{"{name}",',
            literal(found[name]) + ",",
            f"     {f'includes_{index}' if count else 'NULL'}, {count}, {{{halves[0]}ull, {halves[1]}ull}}, {specific:d}}},",
        ]
    lines += ["};", f"const int32_t cuda_num_sources = {len(names)};", ""]
    lines.insert(2, "#include <stddef.h>\n")
    options.output.write_text("\n".join(lines), encoding="utf-8")
    if options.depfile:
        inputs = " ".join(str(locate(roots, name)) for name in names)
        options.depfile.write_text(f"{options.output}: {inputs}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
