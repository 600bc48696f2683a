"""test_vllm.py: the plug-in for vLLM beside the facts of vLLM 0.33, and steps that a runner would ask of it.

vLLM is not needed and not used: stand-ins of its base classes are made from tests/contracts/vllm.json.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import itertools
from types import SimpleNamespace
from typing import Any, Dict, List, Optional, Sequence

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flash_dmattn.integrations as integrations
from engine_stand_ins import MISSING, Capability, contract, put_vllm, with_ours
from engine_truth import attended, close
from flash_dmattn import _native
from flash_dmattn.integrations import _engines

pytestmark = pytest.mark.skipif(not MISSING["vllm"], reason="vLLM itself is installed: its stand-ins would hide it")

HEADS, HEADS_KV, DIM = 8, 4, 32
LAYOUTS = {
    name: tuple(attribute["default"])
    for name, attribute in contract("vllm")["classes"]["vllm.v1.kv_cache_layout.KVCacheLayout"]["attributes"].items()
}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-ins, and our module as `ours`."""
    yield from with_ours(monkeypatch, "vllm", put_vllm(monkeypatch))


# ---- the contract ----------------------------------------------------------------------------------------------------

PLACE = "vllm.v1.attention.backend."
PAIRS = [("Backend", "AttentionBackend"), ("MetadataBuilder", "AttentionMetadataBuilder"), ("Impl", "AttentionImpl")]


def expected_parameters(facts: Dict[str, Any]) -> List[Any]:
    none = inspect.Parameter.empty
    return [(each["name"], each["default"] if "default" in each else none) for each in facts["parameters"]]


def found_parameters(function: Any) -> List[Any]:
    return [(name, each.default) for name, each in inspect.signature(function).parameters.items()]


def same(ours: List[Any], theirs: List[Any]) -> bool:
    """Names and defaults; a default that is no literal, as an enum's member, is only asked to be there."""
    return len(ours) == len(theirs) and all(
        name == other and (default == expected or str(expected).startswith("= "))
        for (name, default), (other, expected) in zip(ours, theirs)
    )


@pytest.mark.parametrize("own, theirs", PAIRS)
def test_methods_have_the_parameters_of_the_contract(own: str, theirs: str, engine: Any) -> None:
    cls, facts = getattr(engine.ours, own), engine.facts[PLACE + theirs]
    known = {**engine.facts[PLACE + "AttentionImplBase"]["methods"]} if own == "Impl" else {}
    known.update(facts["methods"])
    if own == "Impl":  # vLLM calls it, though the base class does not name it
        known["do_kv_cache_update"] = engine.facts["vllm.v1.attention.backends.flash_attn.FlashAttentionImpl"]["methods"][
            "do_kv_cache_update"
        ]
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", member)
        if not inspect.isfunction(function) or (name.startswith("_") and name != "__init__"):
            continue
        assert name in known, f"vLLM knows no {name}"
        more = {"sinks": None} if (own, name) == ("Impl", "__init__") else {}
        expected = expected_parameters(known[name]) + list(more.items())
        assert same(found_parameters(function), expected), name
        for kind in (staticmethod, classmethod):
            assert isinstance(member, kind) == bool(known[name].get(kind.__name__)), name
    assert not [name for name, each in known.items() if each.get("abstractmethod") and name not in vars(cls)]
    attributes = {**facts["attributes"], **engine.facts[PLACE + "AttentionImplBase"]["attributes"]}
    own_attributes = [name for name, each in vars(cls).items() if not callable(each) and not name.startswith("__")]
    plain = [name for name in own_attributes if not isinstance(vars(cls)[name], (staticmethod, classmethod))]
    assert not [name for name in plain if name not in attributes and not name.startswith("_abc") and name != "_parameters"]


def test_an_impl_has_the_attributes_that_layers_read(engine: Any) -> None:
    impl = engine.ours.Impl(HEADS, DIM, 0.25, HEADS_KV)
    known = {**engine.facts[PLACE + "AttentionImplBase"]["attributes"], **engine.facts[PLACE + "AttentionImpl"]["attributes"]}
    needed = [name for name, each in known.items() if "default" not in each and "_world_size" not in name and "rank" not in name]
    assert {"num_heads", "head_size", "scale", "kv_cache_dtype"} == set(needed)
    for name in [*needed, "num_kv_heads", "sinks", "sliding_window", "attn_type", "kv_sharing_target_layer_name"]:
        assert hasattr(impl, name), name


def test_answers_for_this_version(engine: Any) -> None:
    """Every predicate that vLLM has, by name: True only where a test of this file says why."""
    backend, none = engine.ours.Backend, engine.facts[PLACE + "AttentionBackend"]["methods"]
    answers = {
        name: getattr(backend, name)()
        for name, facts in none.items()
        if (name.startswith("supports_") or name.startswith("is_")) and len(facts["parameters"]) == 1
        if "returns" in facts or name in vars(backend)
    }
    true = {"supports_sink", "supports_sliding_window", "supports_non_causal", "supports_device_cpu_query_lens_mismatch"}
    assert {name for name, answer in answers.items() if answer} == true
    assert backend.get_name() == "CUSTOM" and backend.get_impl_cls() is engine.ours.Impl
    assert backend.get_builder_cls() is engine.ours.MetadataBuilder and backend.supported_kv_cache_layouts() is None
    assert [each.base for each in backend.get_supported_kernel_block_sizes()] == [16]
    assert not backend.forward_includes_kv_cache_update and backend.supports_kv_cache_update_bypass
    assert all(backend.supports_attn_type(kind.value) for kind in engine.AttentionType)
    assert not backend.supports_attn_type("other")


# ---- answers of the plan ---------------------------------------------------------------------------------------------


def asked(backend: Any, **changed: Any) -> Optional[str]:
    facts: Dict[str, Any] = {
        "head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "device_capability": None,
    }  # fmt: skip
    answer: Optional[str] = backend.supports_combination(**{**facts, **changed})
    return answer


def test_sizes_and_dtypes_are_the_plans(engine: Any) -> None:
    backend = engine.ours.Backend
    for size in (1, 64, 80, 128, 256):
        assert backend.supports_head_size(size) and asked(backend, head_size=size) is None
    assert not backend.supports_head_size(264)
    assert "head dims are at most 256" in str(asked(backend, head_size=264))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert backend.supports_dtype(dtype)
    assert not backend.supports_dtype(torch.float64) and not backend.supports_dtype(torch.int8)
    assert asked(backend, kv_cache_dtype="bfloat16", has_sink=True) is None
    assert "use auto" in str(asked(backend, kv_cache_dtype="float16"))


def test_a_device_without_kernels_is_refused_by_a_sentence(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plan says of a device is what vLLM hears."""
    backend, h200 = engine.ours.Backend, Capability((9, 0))
    assert backend.supports_compute_capability(h200) and not backend.supports_compute_capability(Capability((7, 5)))
    engine.platform.capability = h200
    assert backend.supports_head_size(128) and asked(backend, head_size=128, device_capability=h200) is None
    plans: List[Any] = []

    def plan(device: str, *facts: Any) -> Any:
        plans.append((device, *facts))
        if device == "sm_75" or facts[4] > 128:
            raise NotImplementedError("no kernel takes this problem")
        return "mma", "mma.decode", ""

    monkeypatch.setattr(_native, "plan_cache", plan)
    _engines.refusal.cache_clear()
    try:
        assert backend.supports_compute_capability(h200) and not backend.supports_compute_capability(Capability((7, 5)))
        assert backend.supports_head_size(128) and not backend.supports_head_size(256)
        assert asked(backend, head_size=128, device_capability=h200, has_sink=True, block_size=64) is None
        assert plans[-1][0] == "sm_90" and plans[-1][5:8] == (128, 64, 1)
        assert asked(backend, head_size=256, device_capability=h200) == "no kernel takes this problem"
        assert {each[0] for each in plans} == {"sm_75", "sm_90"} and {each[2] for each in plans} == {1, 256}
    finally:
        _engines.refusal.cache_clear()


def test_plans_of_devices_that_are_not_here() -> None:
    family, kernel, reason = _native.plan_cache("cpu", "bfloat16", 1, 8, 1, 128, 16, 1, 30.0, True, 127)
    assert family == "cpu" and kernel.startswith("cpu.") and reason
    with pytest.raises(NotImplementedError, match="head dims are at most 256"):
        _native.plan_cache("cpu", "bfloat16", 1, 8, 1, 512, 16, 0, 0.0, True, -1)
    with pytest.raises(ValueError, match="sm_0"):
        _native.plan_cache("sm_0", "bfloat16", 1, 8, 1, 128, 16, 0, 0.0, True, -1)


# ---- a runner --------------------------------------------------------------------------------------------------------


class Runner:
    """Layers with one cache, requests with shuffled pages: what vLLM's model runner has of attention."""

    def __init__(self, engine: Any, layout: str = "LBHNC", page: int = 16, pages: int = 0, **impl: Any) -> None:
        self.engine, self.page, self.layers = engine, page, 2
        self.heads, self.heads_kv = impl.pop("num_heads", HEADS), impl.pop("num_kv_heads", HEADS_KV)
        self.dtype = impl.pop("dtype", torch.float32)
        self.options = impl
        self.impl = engine.ours.Impl(self.heads, DIM, DIM**-0.5, self.heads_kv, **impl)
        self.builder = engine.ours.MetadataBuilder(None, ["layer"], SimpleNamespace(), torch.device("cpu"))
        shape = (self.layers, pages, self.heads_kv, page, 2 * DIM)
        order = LAYOUTS[layout]
        whole = torch.full([shape[axis] for axis in order], torch.nan, dtype=self.dtype)
        self.cache = whole.permute([order.index(axis) for axis in range(5)])  # [layers, pages, Hkv, page size, 2 D]
        self.free = torch.randperm(pages).tolist()

    def slots(self, table: torch.Tensor, first: int, last: int) -> torch.Tensor:
        at = torch.arange(first, last)
        return table[at // self.page].long() * self.page + at % self.page

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        self.impl.do_kv_cache_update(None, k, v, self.cache[1], slots)


def needed(lengths: Sequence[int], page: int) -> int:
    return sum(-(-length // page) for length in lengths)


def step(runner: Runner, counts: Sequence[int], contexts: Sequence[int], rows: int = 0, requests: int = 0) -> Any:
    """A step of requests with `counts` new tokens behind `contexts` keys, filled up to so many rows and requests.

    Gives the common metadata, the step's q, k and v, and what float64 says of each request.
    """
    lengths = [count + context for count, context in zip(counts, contexts)]
    total, batch = sum(counts), len(counts)
    rows, requests = max(rows, total), max(requests, batch)
    table = torch.randint(-(2**31), 2**31 - 1, (requests, max(needed([each], runner.page) for each in lengths) + 2)).int()
    q, k, v = (
        torch.randn(rows, heads, DIM).to(runner.dtype) for heads in (runner.heads, runner.heads_kv, runner.heads_kv)
    )
    slots, truths, first = torch.full((rows,), -1), [], 0
    for b, (count, context) in enumerate(zip(counts, contexts)):
        pages = [runner.free.pop() for _ in range(needed([lengths[b]], runner.page))]
        table[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        old_k, old_v = torch.randn(2, context, runner.heads_kv, DIM).to(runner.dtype)
        runner.write(old_k, old_v, runner.slots(table[b], 0, context))
        mine = slice(first, first + count)
        slots[mine] = runner.slots(table[b], context, lengths[b])
        truths.append((q[mine], torch.cat([old_k, k[mine]]), torch.cat([old_v, v[mine]])))
        first += count
    starts = torch.tensor([0, *itertools.accumulate(counts)] + [total] * (requests - batch), dtype=torch.int32)
    common = runner.engine.CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=torch.full_like(starts, -7),  # nobody may read it
        seq_lens=torch.tensor(lengths + [0] * (requests - batch), dtype=torch.int32),
        num_reqs=requests,
        num_actual_tokens=rows,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=slots,
    )
    return common, (q, k, v), truths


def truth_of(runner: Runner, truths: Any, causal: Optional[Sequence[bool]] = None) -> torch.Tensor:
    given, whole = runner.options, str(runner.options.get("attn_type", "")).startswith("encoder")
    left = -1 if given.get("sliding_window") is None else given["sliding_window"] - 1
    window = (left, left if whole and given["attn_type"] != "encoder_decoder" else 0 if left >= 0 else -1)
    options = {"window": window, "softcap": given.get("logits_soft_cap", 0.0), "sinks": given.get("sinks")}
    kinds = [True] * len(truths) if causal is None else causal
    return torch.cat([attended(*each, DIM**-0.5, kind, **options) for each, kind in zip(truths, kinds)])


def play(runner: Runner, counts: Sequence[int], contexts: Sequence[int], causal: Any = True, **padding: int) -> None:
    """Runs a step as vLLM does, and compares every row."""
    common, (q, k, v), truths = step(runner, counts, contexts, **padding)
    common.causal = causal
    metadata = runner.builder.build(0, common)
    runner.write(k, v, metadata.slot_mapping)
    output = torch.full((q.shape[0] + 3, runner.heads, DIM), torch.nan, dtype=runner.dtype)
    more = torch.cat([q, torch.full((3, *q.shape[1:]), torch.nan, dtype=q.dtype)])  # rows beyond num_actual_tokens
    assert runner.impl.forward(None, more, None, None, runner.cache[1], metadata, output) is output
    total = sum(counts)
    kinds = causal.bool().tolist() if isinstance(causal, torch.Tensor) else [causal] * len(counts)
    close(output[:total], truth_of(runner, truths, kinds), runner.dtype)
    assert (output[total : q.shape[0]] == 0).all() and output[q.shape[0] :].isnan().all()
    assert runner.cache[0].isnan().all(), "another layer was written"


SHAPES = {
    "decode 2": ([1] * 2, [31, 2047]),
    "decode 8": ([1] * 8, [31, 63, 127, 255, 511, 1023, 1535, 2047]),
    "decode 32": ([1] * 32, [31 + 13 * i for i in range(32)]),
    "prefill 8": ([8], [24]),
    "prefill 64": ([64, 64], [32, 4032]),
    "prefill alone": ([64, 33], [0, 0]),
    "mix 1 5": ([1, 1, 5, 5], [200, 17, 60, 1000]),
    "mix 1 7": ([1, 1, 1, 7, 7, 7], [15, 16, 17, 40, 300, 0]),
    "mix 1 32": ([1, 1, 1, 32, 32, 32], [100, 700, 33, 0, 500, 96]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, engine: Any) -> None:
    counts, contexts = SHAPES[shape]
    pages = needed([count + context for count, context in zip(counts, contexts)], 16)
    play(Runner(engine, pages=pages), counts, contexts)


MIX = ([1, 1, 5, 9], [40, 17, 60, 130])


def runner_for_mix(engine: Any, **options: Any) -> Runner:
    page = options.get("page", 16)
    return Runner(engine, pages=needed([sum(pair) for pair in zip(*MIX)], page) + 3, **options)


@pytest.mark.parametrize("page", [1, 16, 48, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_layouts_and_pages(layout: str, page: int, engine: Any) -> None:
    play(runner_for_mix(engine, layout=layout, page=page), *MIX)


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tensor_parallel_head_counts(ranks: int, layout: str, engine: Any) -> None:
    """With 4 ranks a rank has one KV head, whose axis may have any stride."""
    play(runner_for_mix(engine, layout=layout, num_heads=HEADS // ranks, num_kv_heads=HEADS_KV // ranks), *MIX)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 6}, {"logits_soft_cap": 5.0}, {"sinks": torch.linspace(-2, 2, HEADS)}],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_features(options: Dict[str, Any], dtype: torch.dtype, engine: Any) -> None:
    options = {name: each.to(dtype) if isinstance(each, torch.Tensor) else each for name, each in options.items()}
    play(runner_for_mix(engine, dtype=dtype, **options), *MIX)


@pytest.mark.parametrize("window", [None, 6])
def test_not_causal(window: Optional[int], engine: Any) -> None:
    """For all requests, or for some: rows of a request that is not causal see its later keys too."""
    options = {} if window is None else {"sliding_window": window}
    if window is None:
        play(runner_for_mix(engine), *MIX, causal=False)
    play(runner_for_mix(engine, **options), *MIX, causal=torch.tensor([1, 0, 0, 1], dtype=torch.int32))


def test_rows_and_requests_that_fill_a_graph_up(engine: Any) -> None:
    play(runner_for_mix(engine), *MIX, rows=32, requests=8)


def test_a_step_is_replayed_with_other_requests(engine: Any) -> None:
    """As a captured graph does: the same metadata, made of bounds, and other numbers in its tensors."""
    runner = Runner(engine, pages=64)
    fixed, buffers, _ = step(runner, [1] * 4, [100, 100, 100, 100])
    fixed.max_query_len, fixed.max_seq_len = 4, 128
    metadata = runner.builder.build(0, fixed)
    for counts, contexts in (([1, 1, 2], [0, 90, 17]), ([4], [124]), ([1] * 4, [1, 2, 3, 4])):
        common, given, truths = step(runner, counts, contexts, rows=4, requests=4)
        for name in ("query_start_loc", "seq_lens", "slot_mapping"):
            getattr(fixed, name).copy_(getattr(common, name))
        wide = fixed.block_table_tensor
        wide[:, : common.block_table_tensor.shape[1]] = common.block_table_tensor[:, : wide.shape[1]]
        for buffer, new in zip(buffers, given):
            buffer.copy_(new)
        q, k, v = buffers
        runner.write(k, v, metadata.slot_mapping)
        output = torch.full_like(q, torch.nan)
        runner.impl.forward(None, q, None, None, runner.cache[1], metadata, output)
        close(output[: sum(counts)], truth_of(runner, truths), runner.dtype)
        assert (output[sum(counts) :] == 0).all()


def test_a_group_of_layers_with_another_table(engine: Any) -> None:
    runner = runner_for_mix(engine)
    common, (q, k, v), truths = step(runner, *MIX)
    other = runner.builder.build(0, engine.CommonAttentionMetadata(**{
        **vars(common), "block_table_tensor": common.block_table_tensor * 0, "slot_mapping": common.slot_mapping * 0 - 1,
    }))  # fmt: skip
    metadata = runner.builder.update_block_table(other, common.block_table_tensor, common.slot_mapping)
    assert (other.block_table == 0).all() and (other.slot_mapping == -1).all()
    runner.write(k, v, metadata.slot_mapping)
    output = torch.empty_like(q)
    runner.impl.forward(None, q, k, v, runner.cache[1], metadata, output)
    close(output, truth_of(runner, truths), runner.dtype)


def test_a_layer_that_reads_the_cache_of_another(engine: Any) -> None:
    """kv_sharing_target_layer_name: vLLM writes nothing for such a layer, and gives it the other's cache."""
    runner = runner_for_mix(engine)
    common, (q, k, v), truths = step(runner, *MIX)
    metadata = runner.builder.build(0, common)
    runner.write(k, v, metadata.slot_mapping)
    reader = engine.ours.Impl(HEADS, DIM, DIM**-0.5, HEADS_KV, kv_sharing_target_layer_name="other")
    output = torch.empty_like(q)
    reader.forward(None, q, torch.full_like(k, torch.nan), torch.full_like(v, torch.nan), runner.cache[1], metadata, output)
    close(output, truth_of(runner, truths), runner.dtype)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", ["ENCODER", "ENCODER_ONLY"])
def test_encoders_have_no_cache(kind: str, window: Optional[int], engine: Any) -> None:
    runner = runner_for_mix(engine, attn_type=engine.AttentionType[kind].value, sliding_window=window)
    common, (q, k, v), _ = step(runner, [5, 1, 12], [0, 0, 0])
    assert runner.cache.isnan().all()
    output = torch.full_like(q, torch.nan)
    runner.impl.forward(None, q, k, v, torch.empty(0), runner.builder.build(0, common), output)
    bounds = common.query_start_loc.tolist()
    truths = [(q[a:b], k[a:b], v[a:b]) for a, b in zip(bounds, bounds[1:])]
    close(output, truth_of(runner, truths, [False] * 3), runner.dtype)


def test_cross_attention(engine: Any) -> None:
    """Rows of the decoder see all keys of the encoder, which were written before and are not the rows' own."""
    runner = runner_for_mix(engine, attn_type=engine.AttentionType.ENCODER_DECODER.value)
    common, (q, _, _), truths = step(runner, [1, 3], [40, 70])
    common.seq_lens -= torch.tensor([1, 3], dtype=torch.int32)  # of the encoder
    common.causal = False
    output = torch.empty_like(q)
    runner.impl.forward(None, q, None, None, runner.cache[1], runner.builder.build(0, common), output)
    truths = [(q, k[: -len(q)], v[: -len(q)]) for q, k, v in truths]
    close(output, truth_of(runner, truths, [False] * 2), runner.dtype)


# ---- what vLLM relies on besides -------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: List[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_build_keeps_references_and_runs_nothing(engine: Any) -> None:
    runner = runner_for_mix(engine)
    common, _, _ = step(runner, *MIX)
    with Operations() as operations:
        metadata = runner.builder.build(0, common)
        runner.builder.update_block_table(metadata, common.block_table_tensor, common.slot_mapping)
    assert not operations.seen
    assert metadata.block_table is common.block_table_tensor and metadata.seq_lens is common.seq_lens
    assert metadata.query_start_loc is common.query_start_loc and metadata.slot_mapping is common.slot_mapping
    support = runner.builder._cudagraph_support
    assert support is engine.AttentionCGSupport.ALWAYS and runner.builder.reorder_batch_threshold is None


def test_a_profiling_run_gives_zeros(engine: Any) -> None:
    output = torch.full((4, HEADS, DIM), torch.nan)
    q = torch.randn_like(output)
    assert (engine.ours.Impl(HEADS, DIM, 1.0).forward(None, q, q, q, torch.empty(0), None, output) == 0).all()


def test_refusals(engine: Any) -> None:
    runner, slopes = runner_for_mix(engine), [0.5] * HEADS
    common, (q, k, v), _ = step(runner, *MIX)
    with pytest.raises(NotImplementedError, match="alibi_slopes is given"):
        engine.ours.Impl(HEADS, DIM, 1.0, alibi_slopes=slopes)
    with pytest.raises(NotImplementedError, match="kv_cache_dtype is fp8; .* use auto"):
        engine.ours.Impl(HEADS, DIM, 1.0, kv_cache_dtype="fp8")
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(NotImplementedError, match=f"{name} is given"):
            runner.impl.forward(None, q, k, v, runner.cache[1], None, q, **{name: torch.ones(1)})
    for name, value in (("mm_req_doc_ranges", {0: [(1, 2)]}), ("rswa_prefix_lens", torch.ones(4))):
        setattr(common, name, value)
        with pytest.raises(NotImplementedError, match=f"{name} is given, but this backend makes no row intervals"):
            runner.builder.build(0, common)
        setattr(common, name, None)


def test_registration(engine: Any) -> None:
    """The entry point's function may run often, and leaves another package's backend where it is."""
    for _ in range(2):
        integrations.register_vllm()
        assert engine.custom.path == "flash_dmattn.integrations.vllm.Backend"
    module, _, name = engine.custom.path.rpartition(".")
    assert getattr(importlib.import_module(module), name) is engine.ours.Backend
    engine.custom.path = "other.Backend"
    with pytest.warns(UserWarning, match="CUSTOM is other.Backend already"):
        integrations.register_vllm()
    assert engine.custom.path == "other.Backend"


def test_entry_points_of_the_package() -> None:
    for group, function in (("vllm.general_plugins", "register_vllm"), ("sglang.srt.plugins", "register_sglang")):
        found = [each for each in importlib.metadata.entry_points(group=group) if each.name == "flash_dmattn"]
        assert [each.load() for each in found] == [getattr(integrations, function)]


def test_without_vllm_one_sentence_says_so() -> None:
    with pytest.raises(ImportError, match="needs vLLM 0.33.*pip install vllm"):
        importlib.import_module("flash_dmattn.integrations.vllm")
