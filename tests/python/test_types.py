"""test_types.py: what the type checkers of `make lint` read is what there is: the typed usage runs, the stub is whole."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib

import typed_usage
from flash_dmattn import _native

NAMES = (
    "masks", "jax", "integrations.transformers", "integrations.doge", "compat", "compat.varlen", "context_parallel"
)  # fmt: skip
MODULES = ("flash_dmattn", *(f"flash_dmattn.{name}" for name in NAMES))


def test_typed_usage_runs():
    typed_usage.main()


def test_typed_usage_calls_every_public_name():
    tree = ast.parse(inspect.getsource(typed_usage))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    imported = {(node.module, each.name) for node in imports for each in node.names}
    of_masks = {("flash_dmattn.masks", node.attr) for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "masks"}
    public = {(module, name) for module in MODULES for name in importlib.import_module(module).__all__}
    assert public <= imported | of_masks


def test_stub_has_what_the_extension_has():
    stub = ast.parse((pathlib.Path(_native.__file__).parent / "_native.pyi").read_text())
    declared = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert declared == {name for name in dir(_native) if not name.startswith("__")}
