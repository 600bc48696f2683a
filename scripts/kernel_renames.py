"""kernel_renames.py: names of today for kernels and their entries in records that older libraries have left."""

from __future__ import annotations

import re

RENAMED = ((r"\bhopper([._])wide", r"hopper\1backward_2pass"), (r"\bmma([._])wide", r"mma\1forward_d1024"),
           (r"\bhopper_visits\b", "hopper_dq_order"))


def current(name: str) -> str:
    """The kernel "hopper.wide" is "hopper.backward_2pass", its entry "hopper_wide_dq" "hopper_backward_2pass_dq"."""
    for old, new in RENAMED:
        name = re.sub(old, new, name)
    return name
