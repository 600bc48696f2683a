#!/usr/bin/env python3
"""engine_contracts.py: writes what plug-ins of an inference engine rely on, read from the engine's sources, as facts.
Usage: engine_contracts.py vllm|sglang FOLDER VERSION > tests/contracts/NAME.json

FOLDER holds the package `vllm` or `sglang`, as its wheel or a checkout does. Sources are parsed and never run. The facts
are names, parameters, defaults, and what a method returns where that is one constant; no code is kept.
"""

from __future__ import annotations

import ast
import json
import pathlib
import sys
from typing import Any, Dict, List, Optional

# module: classes and functions of it; after a colon the methods that matter, where not all do.
WANTED = {
    "vllm": {
        "vllm.v1.attention.backend": [
            "AttentionBackend", "AttentionMetadata", "CommonAttentionMetadata:", "AttentionCGSupport", "AttentionType",
            "AttentionMetadataBuilder", "AttentionImplBase", "AttentionImpl", "MultipleOf",
        ],
        "vllm.v1.attention.backends.flash_attn": ["FlashAttentionImpl:forward,do_kv_cache_update"],
        "vllm.v1.attention.backends.registry": ["register_backend"],
        "vllm.v1.kv_cache_layout": ["KVCacheLayout:"],
    },
    "sglang": {
        "sglang.srt.layers.attention.base_attn_backend": ["AttentionBackend"],
        "sglang.srt.layers.attention.attention_registry": ["register_attention_backend"],
        "sglang.srt.layers.radix_attention": ["AttentionType", "RadixAttention:__init__"],
        "sglang.srt.mem_cache.memory_pool": ["KVWriteLoc:for_batch", "MHATokenToKVPool:set_kv_buffer,get_kv_buffer"],
        "sglang.srt.mem_cache.swa_memory_pool": ["SWAKVPool:set_kv_buffer,get_kv_buffer,translate_loc_from_full_to_swa"],
        "sglang.srt.model_executor.forward_batch_info": ["ForwardBatch:", "ForwardMode"],
    },
}  # fmt: skip


def constant(node: Optional[ast.AST]) -> Any:
    """A literal's value; of anything else its text after "=". Lists stand for tuples."""
    if node is None:
        return None
    try:
        return json.loads(json.dumps(ast.literal_eval(node)))
    except (ValueError, TypeError):
        return "= " + ast.unparse(node)


def parameters(function: ast.FunctionDef) -> List[Dict[str, Any]]:
    """Name, kind and, where there is one, default of each."""
    given, kinds = function.args, []
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    for one, default in zip(positional, defaults):
        kinds.append({"name": one.arg, **({} if default is None else {"default": constant(default)})})
    if given.vararg:
        kinds.append({"name": given.vararg.arg, "kind": "*"})
    for one, default in zip(given.kwonlyargs, given.kw_defaults):
        kinds.append({"name": one.arg, "kind": "keyword", **({} if default is None else {"default": constant(default)})})
    if given.kwarg:
        kinds.append({"name": given.kwarg.arg, "kind": "**"})
    return kinds


def method_facts(function: ast.FunctionDef) -> Dict[str, Any]:
    marks = {ast.unparse(each) for each in function.decorator_list}
    facts: Dict[str, Any] = {"parameters": parameters(function)}
    facts.update({mark: True for mark in ("staticmethod", "classmethod", "property", "abstractmethod") if mark in marks})
    last = function.body[-1]
    if isinstance(last, ast.Return) and len(function.body) <= 2 and not str(constant(last.value)).startswith("= "):
        facts["returns"] = constant(last.value)
    return facts


def class_facts(node: ast.ClassDef, methods: Optional[List[str]]) -> Dict[str, Any]:
    facts: Dict[str, Any] = {"bases": [ast.unparse(base) for base in node.bases], "attributes": {}, "methods": {}}
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            facts["attributes"][each.target.id] = {} if each.value is None else {"default": constant(each.value)}
        elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            facts["attributes"][each.targets[0].id] = {"default": constant(each.value)}
        elif isinstance(each, ast.FunctionDef) and (methods is None or each.name in methods):
            facts["methods"][each.name] = method_facts(each)
    return facts


def written(value: Any, depth: int = 0) -> str:
    """JSON in the order of the sources, with a line for each member of what lies above a class's attributes and methods, and for each of these."""
    if not isinstance(value, dict) or not value or depth > 3:
        return json.dumps(value, sort_keys=True)
    inner = ",\n".join(f"{' ' * (depth + 1)}{json.dumps(key)}: {written(value[key], depth + 1)}" for key in value)
    return "{\n" + inner + "\n" + " " * depth + "}"


def main() -> int:
    if len(sys.argv) != 4 or sys.argv[1] not in WANTED:
        print(__doc__, file=sys.stderr)
        return 2
    engine, folder, version = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
    found: Dict[str, Any] = {"engine": engine, "version": version, "classes": {}, "functions": {}}
    for module, names in WANTED[engine].items():
        tree = ast.parse((folder / (module.replace(".", "/") + ".py")).read_text())
        there = {each.name: each for each in tree.body if isinstance(each, (ast.ClassDef, ast.FunctionDef))}
        for entry in names:
            name, colon, methods = entry.partition(":")
            node = there[name]
            if isinstance(node, ast.ClassDef):
                found["classes"][f"{module}.{name}"] = class_facts(node, methods.split(",") if colon else None)
            else:
                found["functions"][f"{module}.{name}"] = {"parameters": parameters(node)}
    print(written(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
