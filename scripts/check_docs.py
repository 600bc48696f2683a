#!/usr/bin/env python3
"""check_docs.py: pages name only files that exist and have no long lines, and a page names every measured result.
Usage: check_docs.py [ROOT]

Pages are README.md, CONTRIBUTING.md, bench/results/README.md and everything below docs/ (CHANGELOG.md tells of the
past). A file is named by a link, or in backquotes by its path from the root or from src/. Of a device's results there is
one file a question: two that differ in date or number alone are one too many. No line of any .md file is longer than
WIDTH, but for tables, images and the targets of links.
"""

from __future__ import annotations

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)[^)]*\)")
NAMED = re.compile(r"`((?:bench|bindings|cli|docs|examples|include|python|scripts|src|tests)/[\w./+-]+)")
PLACEHOLDER = re.compile(r"(^|/)[FK](_family)?(/|\.|$)")  # of docs/adding-a-kernel.md: a family's name, a kernel's stem
WIDTH = 120
FOLDERS = ("bench", "bindings", "cli", "docs", "examples", "include", "python", "scripts", "src", "tests")
SOURCE = re.compile(r"`([\w/.-]+\.(?:c|h|cu|cuh|py|sh))`")


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    fixed = (root / name for name in ("README.md", "CONTRIBUTING.md", "bench/results/README.md"))
    return [*(page for page in fixed if page.is_file()), *sorted((root / "docs").rglob("*.md"))]


def exists(root: pathlib.Path, name: str) -> bool:
    name = name.rstrip("./")
    return (root / name).exists() or (root / "src" / name).exists() or any(root.glob(name + ".*"))


def names_fault(root: pathlib.Path, page: pathlib.Path, base_names: set[str]) -> list[str]:
    text = page.read_text(encoding="utf-8")
    missing = {name for name in LINK.findall(text) if not (page.parent / name).exists()}
    missing |= {name for name in NAMED.findall(text) if not exists(root, name)}
    missing |= {name for name in SOURCE.findall(text) if not exists(root, name) and name.rsplit("/", 1)[-1] not in base_names}
    return [f"{page.relative_to(root)}: there is no {name}" for name in sorted(missing) if not PLACEHOLDER.search(name)]


def width_faults(root: pathlib.Path) -> list[str]:
    texts = sorted([*root.glob("*.md"), *(path for folder in FOLDERS for path in (root / folder).rglob("*.md"))])
    faults = []
    for path in texts:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            width = 0 if line.lstrip().startswith(("|", "![")) else len(re.sub(r"\]\([^)]*\)", "]", line))
            if width > WIDTH:
                faults.append(f"{path.relative_to(root)}:{number}: {width} columns; at most {WIDTH}")
    return faults


def results_faults(root: pathlib.Path) -> list[str]:
    """Results that no page and no script names, and more than one for a question."""
    texts = "".join(path.read_text(encoding="utf-8") for path in [*pages(root), *(root / "scripts").glob("*.*")])
    faults, questions = [], {}
    for path in sorted(path for path in (root / "bench/results").rglob("*") if path.is_file() and path.name != "README.md"):
        name = path.relative_to(root).as_posix()
        if path.name not in texts:
            faults.append(f"{name}: no page and no script names it")
        question = re.sub(r"^\d{4}-\d\d-\d\d-|-\d+$", "", path.stem)
        if questions.setdefault((path.parent, question, path.suffix), name) != name:
            faults.append(f"{name}: answers the question of {questions[path.parent, question, path.suffix]}; remove the older")
    return faults


def main(arguments: list[str]) -> int:
    root = pathlib.Path(arguments[0]).resolve() if arguments else ROOT
    sources = (path for folder in FOLDERS for path in (root / folder).rglob("*"))
    base_names = {path.name for path in sources}
    faults = [fault for page in pages(root) for fault in names_fault(root, page, base_names)]
    faults += width_faults(root) + results_faults(root)
    print("\n".join(faults), file=sys.stderr) if faults else print("docs: every file that is named exists, no line is long")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
