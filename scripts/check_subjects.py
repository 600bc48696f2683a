#!/usr/bin/env python3
"""check_subjects.py: subjects of commits keep the form that CONTRIBUTING.md asks for. Usage: check_subjects.py [BASE]

It reads the commits after BASE, the commit before the rule. It passes, with a line, where BASE is missing: in a shallow
clone, or in an unpacked archive. Merges are left out, for git writes their subjects.
"""

from __future__ import annotations

import re
import subprocess
import sys

BASE = "6f7adabb9ca293a4ccb47713b7c2a04a0ef92206"
COLUMNS = 72
# Imperatives that end as other forms of verbs do.
IMPERATIVES = {"Bring", "Embed", "Exceed", "Feed", "Need", "Proceed", "Seed", "Shed", "Speed"}


def faults(subject: str) -> list[str]:
    """What is wrong with a subject: clauses of a sentence."""
    first = re.match(r"\S*", subject)[0]
    found = [f"has {len(subject)} columns; at most {COLUMNS}"] if len(subject) > COLUMNS else []
    if not re.fullmatch(r"[A-Z][a-z]+", first):
        found.append(f'begins with "{first}"; the first word is a verb with an upper-case letter')
    elif first.endswith(("ed", "ing")) and first not in IMPERATIVES:
        found.append(f'begins with "{first}"; the verb stands in the imperative')
    if ";" in subject:
        found.append("has a semicolon; a commit is one thing")
    return found + ["ends with a full stop"] * subject.endswith(".")


def git(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)


def main(arguments: list[str]) -> int:
    base = arguments[0] if arguments else BASE
    if git("cat-file", "-e", base + "^{commit}").returncode:
        print(f"subjects: not checked, commit {base} is not here")
        return 0
    lines = git("log", "--no-merges", "--format=%h %s", f"{base}..HEAD").stdout.splitlines()
    wrong = [f"commit {line.split()[0]}: the subject {fault}" for line in lines for fault in faults(line.partition(" ")[2])]
    print("\n".join(wrong), file=sys.stderr) if wrong else print(f"subjects: {len(lines)} keep the rule")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
