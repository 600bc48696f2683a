#!/usr/bin/env python3
"""Run flash-attention's own tests, from a checkout, through flash_dmattn's names.

Usage: scripts/their_tests.py --suite fa2|fa3|fa4 --path CHECKOUT [--cells 2000] [--part 1/1] [--seconds N] [--tests TEXT] [--again FILE ...] [--json FILE]

CHECKOUT is a folder with flash-attention's `tests`, `hopper` and `flash_attn/cute/testing.py`. Cells are taken in the
order of a hash of their names, until so many have run; those that the suite itself skips do not count. Cells of what
flash_dmattn does not have are left out, and counted by reason. --part 2/4 takes each fourth cell, --seconds ends after
that time, so that several calls may share the work. --again runs the cells that failed in earlier calls, by their
--json files, with the same --draw and --seed. Needs pytest, einops and a CUDA device; with --device cpu the tests'
"cuda" means the CPU, for a look at a few small cells (--largest 256 leaves longer sequences out). Exit code 1: a cell
failed, or none ran.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib.util
import json
import math
import os
import random
import sys
import time
import types
from collections import Counter
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flash_dmattn import compat

# ---- what is left out ------------------------------------------------------------------------------------------------


class Suite(NamedTuple):
    """files: of a checkout. tests: left out whole, reason -> parts of their names. cells: (reason, by parameters)."""

    files: List[str]
    tests: Dict[str, Tuple[str, ...]]
    cells: List[Tuple[str, Callable[[Dict[str, Any]], bool]]]


ATTEMPTS = 20  # of a cell for which the device's memory is lacking
FP8 = ("fp8", lambda parameters: "float8" in str(parameters.get("dtype")))
SUITES = {
    "fa2": Suite(
        ["tests/test_flash_attn.py"],
        {},
        [("dropout", lambda parameters: parameters.get("dropout_p", 0.0) > 0.0)],
    ),
    "fa3": Suite(
        ["hopper/test_flash_attn.py"],
        {"schemas of torch.ops.flash_attn_3": ("bw_compatibility",)},
        [FP8],
    ),
    "fa4": Suite(
        [
            "tests/cute/test_flash_attn.py",
            "tests/cute/test_flash_attn_fast.py",
            "tests/cute/test_flash_attn_combine.py",
            "tests/cute/test_flash_attn_varlen.py",
        ],
        {
            "fp8": ("fp8",),
            "private functions, and caches of kernels": (
                "cache_separates", "reuses_fwd_cache", "value_dim_larger", "preallocated_outputs", "explicit_arch",
                "dynamic_splits_and_semaphore",
            ),
            "sparse MLA by gathered keys": ("mla_",),
            "limits and arithmetic of flash-attn's kernels": ("rejects_splitkv", "ex2_emu", "invalid_head_dim"),
        },
        [FP8],
    ),
}  # fmt: skip


# ---- the names -------------------------------------------------------------------------------------------------------


def _module(name: str, **contents: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


def _private(name: str) -> Any:
    """A private function that the tests import and that cells left out alone would call."""

    def refuse(*given: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{name} is a private function of flash-attn 4")

    refuse.compile_cache = {}  # type: ignore[attr-defined]
    return refuse


def install(suite: str, path: str) -> None:
    """flash-attn's names, and for version 4 its own helpers of tests from the checkout."""
    compat.install((2, 3, 4), replace=True)
    sys.path.insert(0, os.path.join(path, "hopper"))  # where version 3's tests import their helpers from
    if suite != "fa4":
        return
    interface = importlib.import_module("flash_attn.cute.interface")
    for name in ("_flash_attn_fwd", "_flash_attn_bwd", "_flash_attn_bwd_sparse_mla", "_flash_attn_fwd_combine"):
        setattr(interface, name, _private(name))
    # Metadata say how flash-attn's kernels run; ours take no notice.
    interface.get_scheduler_metadata = lambda *given, **options: None  # type: ignore[attr-defined]
    _module("flash_attn.cute.cache_utils", JITCache=dict)
    spec = importlib.util.spec_from_file_location(
        "flash_attn.cute.testing", os.path.join(path, "flash_attn", "cute", "testing.py")
    )
    assert spec is not None and spec.loader is not None
    sys.modules["flash_attn.cute.testing"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


class OnCpu(TorchFunctionMode):
    """"cuda" means the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(value: Any) -> Any:
            is_cuda = value == "cuda" if isinstance(value, str) else isinstance(value, torch.device) and value.type == "cuda"
            return torch.device("cpu") if is_cuda else value

        return function(*map(moved, args), **{name: moved(value) for name, value in (kwargs or {}).items()})


@contextlib.contextmanager
def device_of(name: str) -> Iterator[None]:
    if name == "cuda":
        yield
        return
    torch.cuda.get_device_capability = lambda *given: (9, 0)
    torch.cuda.get_device_properties = lambda *given: types.SimpleNamespace(total_memory=2**34, multi_processor_count=132)
    torch.cuda.empty_cache = torch.cuda.synchronize = lambda *given: None
    with OnCpu():
        yield


# ---- cells -----------------------------------------------------------------------------------------------------------


def names_of(names: Any) -> List[str]:
    """The names of one parametrize mark."""
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def cell_of(axes: List[Tuple[List[str], List[Any]]], index: int) -> Tuple[Any, ...]:
    """The values of cell `index` of the product of axes."""
    cell: List[Any] = []
    for names, values in axes:
        index, place = divmod(index, len(values))
        cell += values[place] if len(names) > 1 else [values[place]]
    return tuple(cell)


class Chooser:
    """A pytest plugin: which cells run, and what became of them."""

    def __init__(self, suite: Suite, options: argparse.Namespace) -> None:
        self.suite, self.options = suite, options
        self.left_out: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.by_test: Counter[str] = Counter()
        self.failures: List[Dict[str, str]] = []
        self.collected = self.remaining = 0
        self.started = time.monotonic()
        self.ended_by = "all cells"

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, name: str, obj: Any) -> Any:
        """No cells of a test that is left out whole, and of a large one those that are drawn."""
        if not name.startswith("test_"):
            return None
        if self.options.tests not in name:
            return []
        marks = [mark for mark in getattr(obj, "pytestmark", ()) if mark.name == "parametrize"]
        axes = [(names_of(mark.args[0]), list(mark.args[1])) for mark in marks]
        count = math.prod(len(values) for _, values in axes)
        for reason, parts in self.suite.tests.items():
            if any(part in name for part in parts):
                self.left_out[reason] += count
                self.collected += count
                return []
        draw = self.options.draw
        if count > draw:  # some have hundreds of thousands, which pytest would take minutes to make
            self.left_out["not drawn, of tests of more cells than are drawn"] += count - draw
            self.collected += count - draw
            others = [mark for mark in obj.pytestmark if mark.name != "parametrize"]
            drawn = random.Random(f"{self.options.seed} {name}").sample(range(count), draw)
            names = [each for axis, _ in axes for each in axis]
            one = pytest.mark.parametrize(names, [cell_of(axes, index) for index in drawn])
            obj.pytestmark = [*others, one.mark]
        return None

    def reason(self, item: Any) -> Optional[str]:
        callspec = getattr(item, "callspec", None)
        parameters = {} if callspec is None else callspec.params
        for reason, holds in self.suite.cells:
            if holds(parameters):
                return reason
        largest = self.options.largest
        lengths = [value for key, value in parameters.items() if "seqlen" in key or "seq_len" in key]
        if largest is not None and any(type(value) is int and value > largest for value in lengths):
            return f"sequences of more than {largest}"
        return None

    def pytest_collection_modifyitems(self, items: List[Any]) -> None:
        self.collected += len(items)
        kept = []
        for item in items:
            reason = self.reason(item)
            if reason is None:
                kept.append((hashlib.sha256(f"{self.options.seed} {item.name}".encode()).hexdigest(), item))
            else:
                self.left_out[reason] += 1
        if self.options.again:
            failed = {failure["cell"] for file in self.options.again for failure in json.load(file)["failures"]}
            kept = [pair for pair in kept if pair[1].nodeid in failed]
        part, parts = self.options.part
        kept.sort(key=lambda pair: pair[0])
        items[:] = [item for _, item in kept[part - 1 :: parts]]
        self.remaining = len(items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        self.outcomes[outcome] += 1
        if outcome in ("passed", "failed"):
            self.by_test[report.nodeid.rpartition("::")[2].partition("[")[0]] += 1
        if outcome == "failed":
            last = report.longreprtext.strip().splitlines()
            lines = [line for line in last if line.startswith("E ")] or last[-1:]
            self.failures.append({"cell": report.nodeid, "error": " ".join(lines[:3])[:400]})

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool:
        """Runs a cell; where processes share a device and its memory is full, again after a while."""
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        for attempt in range(1, 1 + ATTEMPTS):
            try:
                pyfuncitem.obj(**arguments)
                return True
            except RuntimeError as error:
                if attempt == ATTEMPTS or "out of memory" not in str(error):
                    raise
            gc.collect()  # what the cell made was held by its traceback until here
            torch.cuda.empty_cache()
            time.sleep(self.options.wait)
        return True

    @property
    def ran(self) -> int:
        return self.outcomes["passed"] + self.outcomes["failed"]

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: Any, nextitem: Any) -> None:
        if self.ran + 1 > self.options.cells:
            self.ended_by = "cells"
        elif self.options.seconds is not None and time.monotonic() - self.started > self.options.seconds:
            self.ended_by = "seconds"
        else:
            return
        item.session.shouldstop = f"enough {self.ended_by}"

    def record(self) -> Dict[str, Any]:
        device = torch.cuda.get_device_name() if self.options.device == "cuda" else "cpu"
        return {
            "suite": self.options.suite, "commit": self.options.commit, "device": device, "torch": torch.__version__,
            "part": "/".join(map(str, self.options.part)), "seed": self.options.seed, "collected": self.collected,
            "left_out": dict(self.left_out), "remaining": self.remaining, "ran": self.ran,
            "passed": self.outcomes["passed"], "failed": self.outcomes["failed"],
            "skipped_by_suite": self.outcomes["skipped"] + self.outcomes["xfailed"], "by_test": dict(self.by_test),
            "ended_by": self.ended_by, "seconds": round(time.monotonic() - self.started, 1), "failures": self.failures,
        }  # fmt: skip


def part_of(text: str) -> Tuple[int, int]:
    part, _, parts = text.partition("/")
    try:
        if 1 <= int(part) <= int(parts):
            return int(part), int(parts)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 2/4")


def options_of(arguments: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--path", required=True, help="folder of a checkout of flash-attention")
    parser.add_argument("--cells", type=int, default=2000, help="cells that run; default 2000")
    parser.add_argument("--seed", type=int, default=1, help="of the order; default 1")
    parser.add_argument("--part", type=part_of, default=(1, 1), help="PART/PARTS; default 1/1")
    parser.add_argument("--seconds", type=float, help="end after so many seconds")
    parser.add_argument("--tests", default="", help="only tests whose names hold this text")
    parser.add_argument("--draw", type=int, default=8000, help="at most so many cells of a test, by the seed; default 8000")
    parser.add_argument("--again", nargs="+", type=argparse.FileType("r"), help="run the failed cells of these --json files")
    parser.add_argument("--largest", type=int, help="leave out cells of longer sequences")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--wait", type=float, default=5, help="seconds until a cell runs again for which memory was lacking")
    parser.add_argument("--commit", help="the checkout's, for the record")
    parser.add_argument("--json", help="file for the counts; default: standard output alone")
    options = parser.parse_args(arguments)
    for file in SUITES[options.suite].files:
        if not os.path.exists(os.path.join(options.path, file)):
            parser.error(f"{options.path} has no {file}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu runs small cells on the CPU")
    return options


def main(arguments: Optional[List[str]] = None) -> int:
    options = options_of(arguments)
    options.path = os.path.abspath(options.path)
    suite = SUITES[options.suite]
    chooser = Chooser(suite, options)
    with device_of(options.device):
        install(options.suite, options.path)
        pytest.main(
            ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "--noconftest", f"--rootdir={options.path}",
             "--disable-warnings", "--show-capture=no", "-r", "N", *(os.path.join(options.path, file) for file in suite.files)],
            plugins=[chooser],
        )  # fmt: skip
    record = chooser.record()
    text = json.dumps(record, indent=1)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)
    return 1 if record["failed"] or not record["ran"] else 0


if __name__ == "__main__":
    sys.exit(main())
