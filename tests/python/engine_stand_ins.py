"""engine_stand_ins.py: modules that stand in for vLLM's and SGLang's, made from the facts in tests/contracts.

A class has the methods, attributes and fields that the facts name. A method gives the constant that the facts name, and
without one raises NotImplementedError. Nothing else of an engine is here.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import json
import pathlib
import sys
import types
from typing import Any, Dict, Generic, Iterator, List, Optional, TypeVar

import flash_dmattn.integrations as integrations
import pytest
import torch

CONTRACTS = pathlib.Path(__file__).resolve().parent.parent / "contracts"
MISSING = {name: importlib.util.find_spec(name) is None for name in ("vllm", "sglang")}


def contract(engine: str) -> Dict[str, Any]:
    facts: Dict[str, Any] = json.loads((CONTRACTS / f"{engine}.json").read_text())
    return facts


def _method(name: str, facts: Dict[str, Any]) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        if "returns" not in facts:
            raise NotImplementedError(name)
        return facts["returns"]

    call.__name__ = name
    call.__isabstractmethod__ = bool(facts.get("abstractmethod"))  # type: ignore[attr-defined]
    for kind in (staticmethod, classmethod, property):
        if facts.get(kind.__name__):
            return kind(call)
    return call


def base_of(facts: Dict[str, Any], name: str, *bases: type, **own: Any) -> Any:
    """A class of the facts that others derive from; `own` says what its facts do not."""
    members: Dict[str, Any] = {each: _method(each, method) for each, method in facts["methods"].items()}
    members.pop("__new__", None)
    for each, attribute in facts["attributes"].items():
        if "default" in attribute and not str(attribute["default"]).startswith("= "):
            members[each] = attribute["default"]
    return type(name, bases or (object,), {**members, **own})


def record_of(facts: Dict[str, Any], name: str) -> Any:
    """A dataclass of the facts' fields."""
    fields: List[Any] = []
    for each, attribute in facts["attributes"].items():
        default = attribute.get("default")
        fields.append((each, Any, dataclasses.field(default=default)) if "default" in attribute else (each, Any))
    return dataclasses.make_dataclass(name, sorted(fields, key=len))


def enum_of(facts: Dict[str, Any], name: str, *mixed: type) -> Any:
    values = {each: attribute["default"] for each, attribute in facts["attributes"].items()}
    values = {each: tuple(value) if isinstance(value, list) else value for each, value in values.items()}
    return enum.Enum(name, values, type=mixed[0] if mixed else None)


def put(monkeypatch: pytest.MonkeyPatch, modules: Dict[str, Dict[str, Any]]) -> None:
    """Modules of those names and members, and the packages above them, until the test ends."""
    for name, members in modules.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            above = ".".join(parts[:depth])
            if above not in sys.modules:
                package = types.ModuleType(above)
                package.__path__ = []
                monkeypatch.setitem(sys.modules, above, package)
        module = types.ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)


# ---- vLLM ------------------------------------------------------------------------------------------------------------


class Capability(tuple):
    major = property(lambda self: self[0])
    minor = property(lambda self: self[1])


class Platform:
    """A platform whose device has a compute capability, or none."""

    def __init__(self) -> None:
        self.capability: Optional[Capability] = None

    def get_device_capability(self) -> Optional[Capability]:
        return self.capability


def put_vllm(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    facts = contract("vllm")["classes"]
    place = "vllm.v1.attention.backend."
    metadata = TypeVar("metadata")

    def keep(self: Any, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    members: Dict[str, Any] = {
        "AttentionMetadata": type("AttentionMetadata", (), {}),
        "AttentionType": enum_of(facts[place + "AttentionType"], "AttentionType", str),
        "AttentionCGSupport": enum_of(facts[place + "AttentionCGSupport"], "AttentionCGSupport"),
        "CommonAttentionMetadata": record_of(facts[place + "CommonAttentionMetadata"], "CommonAttentionMetadata"),
        "MultipleOf": record_of(facts[place + "MultipleOf"], "MultipleOf"),
        "AttentionBackend": base_of(facts[place + "AttentionBackend"], "AttentionBackend"),
    }
    members["AttentionMetadataBuilder"] = types.new_class(
        "AttentionMetadataBuilder",
        (base_of(facts[place + "AttentionMetadataBuilder"], "Facts", __init__=keep), Generic[metadata]),
    )
    whole = base_of(facts[place + "AttentionImplBase"], "ImplBase")
    members["AttentionImpl"] = types.new_class(
        "AttentionImpl", (base_of(facts[place + "AttentionImpl"], "Facts", whole), Generic[metadata])
    )
    custom = types.SimpleNamespace(path=None)
    custom.is_overridden = lambda: custom.path is not None
    custom.get_path = lambda: custom.path
    platform = Platform()
    put(
        monkeypatch,
        {
            "vllm.v1.attention.backend": members,
            "vllm.platforms": {"current_platform": platform},
            "vllm.v1.attention.backends.registry": {
                "AttentionBackendEnum": types.SimpleNamespace(CUSTOM=custom),
                "register_backend": lambda backend, class_path=None, is_mamba=False: setattr(backend, "path", class_path),
            },
        },
    )
    return types.SimpleNamespace(facts=facts, platform=platform, custom=custom, **members)


# ---- SGLang ----------------------------------------------------------------------------------------------------------


class ForwardMode(enum.Enum):
    EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY, DRAFT_EXTEND_V2, SPLIT_PREFILL = range(7)

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_extend_or_draft_extend_or_mixed(self, include_draft_extend_v2: bool = False) -> bool:
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)


class Pool:
    """Slots of one layer; what was never written is NaN."""

    def __init__(self, slots: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        self.keys, self.values = torch.full((2, slots, heads, dim), torch.nan).to(dtype).unbind()

    def get_kv_buffer(self, layer_id: int) -> Any:
        return self.keys, self.values

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any) -> None:
        where = loc_info.loc
        self.keys[where], self.values[where] = cache_k, cache_v


class WindowPool(Pool):
    """A pool whose windowed layer has slots of its own; slot s of the full pool is slot mapping[s] there."""

    def __init__(self, slots: int, heads: int, dim: int, dtype: torch.dtype, mapping: torch.Tensor) -> None:
        super().__init__(slots, heads, dim, dtype)
        self.windowed, self.mapping = Pool(slots, heads, dim, dtype), mapping

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        return self.mapping[kv_indices]

    def get_kv_buffer(self, layer_id: int) -> Any:
        return (self.windowed if layer_id else super()).get_kv_buffer(layer_id)

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any) -> None:
        if not layer.layer_id:
            return super().set_kv_buffer(layer, loc_info, cache_k, cache_v)
        assert torch.equal(loc_info.swa_loc, self.mapping[loc_info.loc])
        self.windowed.set_kv_buffer(layer, dataclasses.replace(loc_info, loc=loc_info.swa_loc), cache_k, cache_v)


def put_sglang(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    facts = contract("sglang")["classes"]
    place = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"

    def both(self: Any, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def nothing(self: Any, forward_batch: Any, in_capture: bool = False) -> None:
        pass

    own = {"init_forward_metadata": both, "init_forward_metadata_out_graph": nothing}
    location = record_of(facts["sglang.srt.mem_cache.memory_pool.KVWriteLoc"], "KVWriteLoc")
    location.for_batch = classmethod(
        lambda cls, batch, *, swa_loc=None, full_loc=None: cls(batch.out_cache_loc, swa_loc, full_loc)
    )
    kinds = enum_of(facts["sglang.srt.layers.radix_attention.AttentionType"], "AttentionType")
    factories: Dict[str, Any] = {}
    choices = ["triton"]
    put(
        monkeypatch,
        {
            "sglang.srt.layers.attention.base_attn_backend": {
                "AttentionBackend": base_of(facts[place], "AttentionBackend", **own)
            },
            "sglang.srt.layers.radix_attention": {"AttentionType": kinds},
            "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": location},
            "sglang.srt.layers.attention.attention_registry": {
                "register_attention_backend": lambda name: lambda factory: factories.setdefault(name, factory)
            },
            "sglang.srt.arg_groups.choices": {"ATTENTION_BACKEND_CHOICES": choices},
        },
    )
    return types.SimpleNamespace(facts=facts, AttentionType=kinds, factories=factories, choices=choices)


def with_ours(monkeypatch: pytest.MonkeyPatch, name: str, stand_ins: Any) -> Iterator[Any]:
    """A fixture's body: an engine's stand-ins with our module, imported beside them, as `ours`; it is forgotten after."""
    module = f"flash_dmattn.integrations.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    stand_ins.ours = importlib.import_module(module)
    yield stand_ins
    sys.modules.pop(module, None)
    integrations.__dict__.pop(name, None)
