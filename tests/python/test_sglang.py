"""test_sglang.py: the plug-in for SGLang beside the facts of SGLang 0.5.23, and batches that a runner would give it.

SGLang is not needed and not used: stand-ins of its base class are made from tests/contracts/sglang.json.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from types import SimpleNamespace
from typing import Any, Dict, List, Sequence

import pytest
import torch

import flash_dmattn.integrations as integrations
from engine_stand_ins import MISSING, ForwardMode, Pool, WindowPool, put_sglang, with_ours
from engine_truth import attended, close

pytestmark = pytest.mark.skipif(not MISSING["sglang"], reason="SGLang itself is installed: its stand-ins would hide it")

HEADS, HEADS_KV, DIM, CONTEXT = 8, 2, 32, 640
BASE = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-ins, and our module as `ours`."""
    yield from with_ours(monkeypatch, "sglang", put_sglang(monkeypatch))


# ---- the contract ----------------------------------------------------------------------------------------------------


def test_methods_have_the_parameters_of_the_contract(engine: Any) -> None:
    """Ours begin with the engine's parameters; `sinks` and what a layer may give follow where the engine has **kwargs."""
    known, empty = engine.facts[BASE]["methods"], inspect.Parameter.empty
    found = 0
    for name, member in vars(engine.ours.Backend).items():
        if not inspect.isfunction(member) or name.startswith("_"):
            continue
        assert name in known, f"SGLang knows no {name}"
        theirs = [each for each in known[name]["parameters"] if each.get("kind") != "**"]
        ours = list(inspect.signature(member).parameters.values())
        pairs = [(each["name"], each.get("default", empty)) for each in theirs]
        assert [(each.name, each.default) for each in ours[: len(pairs)]] == pairs, name
        takes_more = len(theirs) < len(known[name]["parameters"])
        assert [each.name for each in ours[len(pairs) :]] == (["sinks", "more"] if takes_more else [])
        found += 1
    assert found == 5
    attributes = engine.facts[BASE]["attributes"]
    assert "needs_cpu_seq_lens" in attributes and engine.ours.Backend.needs_cpu_seq_lens is False


def test_what_is_read_of_a_batch_is_there(engine: Any) -> None:
    """A batch of the fields that SGLang's has, and of no others, serves every step below."""
    fields = engine.facts["sglang.srt.model_executor.forward_batch_info.ForwardBatch"]["attributes"]
    assert set(vars(Runner(engine).batch([1], [4])[0])) - {"out_cache_loc"} <= set(fields)
    modes = engine.facts["sglang.srt.model_executor.forward_batch_info.ForwardMode"]
    assert set(ForwardMode.__members__) <= set(modes["attributes"])
    called = {name for name in vars(ForwardMode) if name.startswith("is_")}
    assert called <= set(modes["methods"])
    layer = [each["name"] for each in engine.facts["sglang.srt.layers.radix_attention.RadixAttention"]["methods"]["__init__"]["parameters"]]
    assert {"scaling", "layer_id", "logit_cap", "sliding_window_size", "is_cross_attention", "attn_type", "logit_capping_method"} <= set(layer)
    pool = engine.facts["sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"]["methods"]
    for name, number in (("set_kv_buffer", 5), ("get_kv_buffer", 2)):
        own = list(inspect.signature(getattr(Pool, name)).parameters)
        assert own == [each["name"] for each in pool[name]["parameters"]][:number]
    window = engine.facts["sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"]["methods"]
    assert [each["name"] for each in window["translate_loc_from_full_to_swa"]["parameters"]] == ["self", "kv_indices"]


# ---- a runner --------------------------------------------------------------------------------------------------------


class Runner:
    """Pools, requests with shuffled slots or pages, and one layer: what SGLang's model runner has of attention."""

    def __init__(self, engine: Any, page: int = 1, slots: int = 4096, windowed: bool = False, **layer: Any) -> None:
        self.engine, self.page = engine, page
        self.heads, self.heads_kv = layer.pop("heads", HEADS), layer.pop("heads_kv", HEADS_KV)
        self.dtype = layer.pop("dtype", torch.float32)
        size = slots, self.heads_kv, DIM, self.dtype
        # Pages of the windowed pool are others: the full pool's, shuffled.
        pages = torch.randperm(slots // page)
        mapping = (pages[:, None] * page + torch.arange(page)).flatten()
        self.pool = WindowPool(*size, mapping) if windowed else Pool(*size)
        self.table = torch.randint(0, slots, (16, CONTEXT)).to(torch.int32)  # rows are of no request before
        self.free = torch.randperm(slots // page).tolist()
        model = SimpleNamespace(head_dim=DIM, is_encoder_decoder=False, attention_chunk_size=None)
        self.facts = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.table), token_to_kv_pool=self.pool, page_size=page,
            device="cpu", dtype=self.dtype, kv_cache_dtype=self.dtype, model_config=model, kv_index_translator=None,
            use_mla_backend=False,
        )  # fmt: skip
        facts = {
            "layer_id": int(windowed), "scaling": DIM**-0.5, "logit_cap": 0.0, "logit_capping_method": "tanh",
            "sliding_window_size": -1, "is_cross_attention": False, "attn_type": engine.AttentionType.DECODER,
        }  # fmt: skip
        self.layer = SimpleNamespace(
            **{**facts, **layer}, tp_q_head_num=self.heads, tp_k_head_num=self.heads_kv, head_dim=DIM, v_head_dim=DIM
        )

    def backend(self) -> Any:
        return self.engine.ours.Backend(self.facts)

    def batch(self, counts: Sequence[int], contexts: Sequence[int], mode: Any = ForwardMode.DECODE) -> Any:
        """(a batch of requests with `counts` new tokens behind `contexts` keys, what float64 needs of each)."""
        requests = torch.randperm(len(self.table))[: len(counts)]
        lengths = [count + context for count, context in zip(counts, contexts)]
        truths, slots = [], []
        for request, count, context, length in zip(requests.tolist(), counts, contexts, lengths):
            pages = torch.tensor([self.free.pop() for _ in range(-(-length // self.page))])
            mine = (pages[:, None] * self.page + torch.arange(self.page)).flatten()
            self.table[request, : len(mine)] = mine.to(torch.int32)
            k, v = torch.randn(2, length, self.heads_kv, DIM).to(self.dtype)
            for pool in (self.pool, getattr(self.pool, "windowed", None)):
                if pool is not None:
                    old = mine[:context] if pool is self.pool else self.pool.mapping[mine[:context]]
                    pool.keys[old], pool.values[old] = k[:context], v[:context]
            slots.append(mine[context:length])
            truths.append((torch.randn(count, self.heads, DIM).to(self.dtype), k, v))
        batch = SimpleNamespace(
            forward_mode=mode, spec_info=None, req_pool_indices=requests, seq_lens=torch.tensor(lengths),
            out_cache_loc=torch.cat(slots), seq_lens_cpu=None, extend_seq_lens=None, extend_seq_lens_cpu=None,
            extend_num_tokens=None,
        )  # fmt: skip
        if mode is not ForwardMode.DECODE:
            batch.extend_seq_lens = torch.tensor(counts, dtype=torch.int32)
            batch.extend_num_tokens = sum(counts)
        return batch, truths

    def run(self, backend: Any, batch: Any, truths: Any, counts: Sequence[int], **more: Any) -> Any:
        q = torch.cat([each[0] for each in truths]).flatten(1)
        k, v = (torch.cat([each[kind][-count:] for each, count in zip(truths, counts)]) for kind in (1, 2))
        forward = backend.forward_decode if batch.forward_mode is ForwardMode.DECODE else backend.forward_extend
        return forward(q, k, v, self.layer, batch, **more)


def play(
    runner: Runner,
    counts: Sequence[int],
    contexts: Sequence[int],
    mode: Any = ForwardMode.EXTEND,
    on_host: bool = False,
    **more: Any,
) -> None:
    """Runs a step as SGLang does, and compares every row."""
    batch, truths = runner.batch(counts, contexts, mode)
    batch.extend_seq_lens_cpu = list(counts) if on_host else None
    backend, layer = runner.backend(), runner.layer
    backend.init_forward_metadata(batch)
    out = runner.run(backend, batch, truths, counts, **more)
    assert out.shape == (sum(counts), runner.heads * DIM)
    left, causal = layer.sliding_window_size, layer.attn_type is not runner.engine.AttentionType.ENCODER_ONLY
    options = {"window": (left, -1 if causal or left < 0 else left), "softcap": layer.logit_cap, "sinks": more.get("sinks")}
    expected = torch.cat([attended(*each, layer.scaling, causal, **options) for each in truths])
    close(out.view(-1, runner.heads, DIM), expected, runner.dtype)


MIX = ([1, 1, 5, 33], [40, 0, 60, 130])


@pytest.mark.parametrize("page", [1, 4, 16, 64])
@pytest.mark.parametrize("batch", [1, 5, 12])
def test_decode(batch: int, page: int, engine: Any) -> None:
    play(Runner(engine, page), [1] * batch, [17 * i % 300 for i in range(batch)], ForwardMode.DECODE)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL])
@pytest.mark.parametrize("shape", [MIX, ([8], [0]), ([64, 64], [32, 500]), ([1, 1, 1, 32, 32], [100, 300, 33, 0, 96])])
def test_extend(shape: Any, mode: Any, page: int, engine: Any) -> None:
    for on_host in (False, True):
        play(Runner(engine, page), *shape, mode, on_host)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensor_parallel_head_counts(ranks: int, engine: Any) -> None:
    play(Runner(engine, heads=HEADS // ranks, heads_kv=HEADS_KV // ranks), *MIX)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_and_sinks(dtype: torch.dtype, engine: Any) -> None:
    play(Runner(engine, dtype=dtype), *MIX, sinks=torch.linspace(-2, 2, HEADS).to(dtype))


@pytest.mark.parametrize("layer", [{"sliding_window_size": 5}, {"logit_cap": 5.0}, {"sliding_window_size": None}], ids=str)
@pytest.mark.parametrize("page", [1, 16])
def test_windows_and_caps(page: int, layer: Dict[str, Any], engine: Any) -> None:
    runner = Runner(engine, page, **layer)
    runner.layer.sliding_window_size = layer.get("sliding_window_size", -1)
    if runner.layer.sliding_window_size is None:
        batch, truths = runner.batch(*MIX, ForwardMode.EXTEND)
        backend = runner.backend()
        backend.init_forward_metadata(batch)
        expected = torch.cat([attended(*each, runner.layer.scaling) for each in truths])
        close(runner.run(backend, batch, truths, MIX[0]).view(-1, HEADS, DIM), expected, runner.dtype)
        return
    play(runner, *MIX)
    play(runner, [1, 1], [70, 3], ForwardMode.DECODE)


@pytest.mark.parametrize("page", [1, 16])
def test_layers_with_windows_have_a_pool_of_their_own(page: int, engine: Any) -> None:
    for mode, counts in ((ForwardMode.EXTEND, [5, 20]), (ForwardMode.DECODE, [1, 1])):
        runner = Runner(engine, page, windowed=True, sliding_window_size=9)
        play(runner, counts, [40, 7], mode)
        runner.layer.layer_id, runner.layer.sliding_window_size = 0, -1  # the layer without a window, from the full pool
        play(runner, counts, [40, 7], mode)


def test_encoder_layers_are_not_causal(engine: Any) -> None:
    for left in (-1, 6):
        play(Runner(engine, attn_type=engine.AttentionType.ENCODER_ONLY, sliding_window_size=left), [7, 30], [0, 0])


def test_keys_that_are_in_the_cache_already(engine: Any) -> None:
    """save_kv_cache False, and k None: neither writes."""
    runner = Runner(engine)
    batch, truths = runner.batch(*MIX, ForwardMode.EXTEND)
    backend = runner.backend()
    backend.init_forward_metadata(batch)
    expected = runner.run(backend, batch, truths, MIX[0])
    before = runner.pool.keys.clone()
    q = torch.cat([each[0] for each in truths]).flatten(1)
    junk = torch.full((sum(MIX[0]), HEADS_KV, DIM), torch.nan)
    for k, save in ((None, True), (junk, False)):
        assert torch.equal(backend.forward_extend(q, k, k, runner.layer, batch, save), expected)
    assert torch.equal(runner.pool.keys.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("page", [1, 16])
def test_metadata_read_no_length_on_the_host(page: int, engine: Any) -> None:
    """Numbers of the device never become Python's: a batch without storage makes metadata too, as a graph asks for."""
    runner = Runner(engine, page)
    batch, _ = runner.batch([1, 1, 1], [9, 90, 30])
    backend = runner.backend()
    backend.req_to_token = backend.req_to_token.to("meta")
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
        setattr(batch, name, getattr(batch, name).to("meta"))
    backend.init_cuda_graph_state(8, 8)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    assert backend.forward_metadata.lengths.is_meta and backend.forward_metadata.table.is_meta
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    if page == 1:
        assert backend.forward_metadata.table is backend.req_to_token  # SGLang's own table, without a copy


def test_requests_that_fill_a_graph_up(engine: Any) -> None:
    """Row 0 of the table and length 1: such a request reads one slot, whatever it holds, and harms no other."""
    runner = Runner(engine)
    batch, truths = runner.batch([1, 1], [20, 50])
    batch.req_pool_indices = torch.cat([batch.req_pool_indices, torch.zeros(2, dtype=torch.int64)])
    batch.seq_lens = torch.cat([batch.seq_lens, torch.ones(2, dtype=torch.int64)])
    spare = torch.tensor(runner.free[-2:])
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, spare])
    filler = (torch.randn(1, HEADS, DIM), torch.randn(1, HEADS_KV, DIM), torch.randn(1, HEADS_KV, DIM))
    backend = runner.backend()
    backend.init_forward_metadata(batch)
    out = runner.run(backend, batch, [*truths, filler, filler], [1] * 4)
    expected = torch.cat([attended(*each, runner.layer.scaling) for each in truths])
    close(out[:2].view(-1, HEADS, DIM), expected, runner.dtype)


# ---- refusals and registration ---------------------------------------------------------------------------------------


def test_models_that_are_refused(engine: Any) -> None:
    wrong: List[Any] = [
        ("use_mla_backend", True, "multi-head latent attention"),
        ("kv_cache_dtype", torch.float8_e4m3fn, "a quantized cache"),
        ("kv_index_translator", SimpleNamespace(is_translating=True), "a unified pool of keys"),
        ("model_config", SimpleNamespace(head_dim=DIM, is_encoder_decoder=True), "cross attention"),
        ("model_config", SimpleNamespace(head_dim=DIM, attention_chunk_size=8), "chunked local attention"),
        ("model_config", SimpleNamespace(head_dim=264), "head dims are at most 256"),
    ]
    for name, value, sentence in wrong:
        runner = Runner(engine)
        setattr(runner.facts, name, value)
        with pytest.raises(NotImplementedError, match=sentence):
            runner.backend()


def test_steps_that_are_refused(engine: Any) -> None:
    runner = Runner(engine)
    backend = runner.backend()
    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        batch, _ = runner.batch([2], [4], mode)
        with pytest.raises(NotImplementedError, match=f"a step of mode {mode.name} is asked for"):
            backend.init_forward_metadata(batch)
    batch, truths = runner.batch([1], [4])
    batch.spec_info = object()
    with pytest.raises(NotImplementedError, match="without drafts"):
        backend.init_forward_metadata(batch)
    batch.spec_info = None
    backend.init_forward_metadata(batch)
    runner.run(backend, batch, truths, [1], q_rope=None, return_lse=False)
    with pytest.raises(NotImplementedError, match="a layer gives k_rope"):
        runner.run(backend, batch, truths, [1], k_rope=torch.ones(1))
    for name, value, sentence in (
        ("is_cross_attention", True, "another mask than a causal one"),
        ("attn_type", engine.AttentionType.DECODER_BIDIRECTIONAL, "another mask than a causal one"),
    ):
        before = getattr(runner.layer, name)
        setattr(runner.layer, name, value)
        with pytest.raises(NotImplementedError, match=sentence):
            runner.run(backend, batch, truths, [1])
        setattr(runner.layer, name, before)
    runner.layer.logit_cap, runner.layer.logit_capping_method = 30.0, "sigmoid"
    with pytest.raises(NotImplementedError, match="logit_capping_method is sigmoid"):
        runner.run(backend, batch, truths, [1])


def test_an_idle_step_needs_no_metadata(engine: Any) -> None:
    backend = Runner(engine).backend()
    backend.init_forward_metadata(SimpleNamespace(forward_mode=ForwardMode.IDLE))
    assert backend.forward_metadata is None


def test_registration(engine: Any) -> None:
    for _ in range(2):
        integrations.register_sglang()
    assert engine.choices == ["triton", "dmattn"]
    assert type(engine.factories["dmattn"](Runner(engine).facts)) is engine.ours.Backend


def test_without_sglang_one_sentence_says_so() -> None:
    with pytest.raises(ImportError, match="needs SGLang 0.5.23.*pip install sglang"):
        importlib.import_module("flash_dmattn.integrations.sglang")
