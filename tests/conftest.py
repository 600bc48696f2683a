"""conftest.py: tests that take turns. Of the cases of `pytest.mark.rotates(n)` a run takes one in n, and the commit says
which; FDM_ALL_CASES=1 runs them all, and `make test-long` does so."""

from __future__ import annotations

import os
import zlib
from collections import defaultdict

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "rotates(n): of all cases with this n, a run takes one in n")


def pytest_collection_modifyitems(items):
    if os.environ.get("FDM_ALL_CASES") == "1":
        return
    commit = zlib.crc32(os.environ.get("FDM_CHECK_SEED", "").encode())
    numbers = defaultdict(int)
    for item in items:
        mark = item.get_closest_marker("rotates")
        if mark is None:
            continue
        parts = mark.args[0]
        if (numbers[parts] + commit) % parts:
            item.add_marker(pytest.mark.skip(reason="left to other commits; FDM_ALL_CASES=1 runs every case"))
        numbers[parts] += 1
