"""marked_table.py: a part of a page that a script writes, between "<!-- NAME -->" and "<!-- end of NAME -->"."""

from __future__ import annotations

import re


def replaced(page: str, name: str, text: str) -> tuple[str, int]:
    """The page with `text` in the places of this name, and how many there are."""
    block = f"<!-- {name} -->\n{text}<!-- end of {name} -->"
    return re.subn(f"<!-- {re.escape(name)} -->.*?<!-- end of {re.escape(name)} -->", lambda _: block, page, flags=re.DOTALL)
