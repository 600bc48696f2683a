#!/usr/bin/env python3
"""selection_table.py: keeps the tables of docs/selection.md those of the library's data. Usage: selection_table.py TOOL [--check]

TOOL is the built selection-table, which prints the tables; each stands between the markers of its number.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import marked_table

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "selection.md"


def main(tool: str, check: bool) -> int:
    printed = subprocess.run([tool], capture_output=True, text=True, check=True).stdout
    tables = printed.strip("\n").split("\n\n")
    old = PAGE.read_text()
    new = old
    for number, table in enumerate(tables, 1):
        new, count = marked_table.replaced(new, f"table {number}", f"{table}\n")
        if count != 1:
            print(f"{PAGE.name}: has {count} places for table {number}", file=sys.stderr)
            return 1
    if check and new != old:
        print(f"{PAGE.name}: its tables are not the library's; run scripts/selection_table.py {tool}", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(new)
    print(f"selection: {len(tables)} tables {'are' if check else 'written from'} the library's")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--check" in sys.argv[2:]))
