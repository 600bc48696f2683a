#!/usr/bin/env python3
"""selection_table.py: keeps tables of docs/backward-tiles.md and docs/selection.md those of the library's data.
Usage: selection_table.py TOOL [--check]

TOOL is the built selection-table, which prints the tables; each stands between the markers of its number.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import marked_table

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
PAGES = (DOCS / "backward-tiles.md", DOCS / "backward-tiles.md", DOCS / "selection.md")  # of each table


def main(tool: str, check: bool) -> int:
    printed = subprocess.run([tool], capture_output=True, text=True, check=True).stdout
    tables = printed.strip("\n").split("\n\n")
    for number, (page, table) in enumerate(zip(PAGES, tables, strict=True), 1):
        old = page.read_text()
        new, count = marked_table.replaced(old, f"table {number}", f"{table}\n")
        if count != 1:
            print(f"{page.name}: has {count} places for table {number}", file=sys.stderr)
            return 1
        if check and new != old:
            print(f"{page.name}: table {number} is not the library's; run scripts/selection_table.py {tool}", file=sys.stderr)
            return 1
        page.write_text(new)
    print(f"selection: {len(tables)} tables {'are' if check else 'written from'} the library's")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--check" in sys.argv[2:]))
