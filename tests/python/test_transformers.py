"""test_transformers.py: models of Hugging Face transformers give with attn_implementation="dmattn" what they give with "eager"."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import flash_dmattn  # noqa: E402
import flash_dmattn.integrations.transformers as integration  # noqa: E402
from flash_dmattn.integrations.transformers import CausalMask, dmattn_mask  # noqa: E402

BOTH_KINDS = ["sliding_attention", "full_attention"]
SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "attn_pdrop": 0.0}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
DECODERS = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "attn_logit_softcapping": 5.0, "sliding_window": 6, "layer_types": BOTH_KINDS},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 6, "layer_types": BOTH_KINDS},
    "Cohere2": {"sliding_window": 6, "layer_types": BOTH_KINDS},
    "Phi3": {},
    "Olmo2": {},
    "Granite": {},
    "StableLm": {},
    "SmolLM3": {},
    "GPTNeoX": {},
    "GPT2": GPT2,
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Mixtral": EXPERTS,
    "Doge": {"keep_window_size": 5},
    "GptOss": {"head_dim": 8, "sliding_window": 6, "layer_types": BOTH_KINDS, **EXPERTS},
    "Llama4Text": {
        "head_dim": 8, "attention_chunk_size": 6, "intermediate_size_mlp": 48, "attn_temperature_tuning": False,
        "layer_types": ["chunked_attention", "full_attention"], **EXPERTS,
    },
}  # fmt: skip
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_start_token_id": 1,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0,
}  # fmt: skip
OTHERS = {
    "T5": ("Seq2SeqLM", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}),
    "Bart": ("Seq2SeqLM", SEQ2SEQ),
    "Bert": ("MaskedLM", {}),
    "ModernBert": ("MaskedLM", {"local_attention": 6, "cls_token_id": 1, "sep_token_id": 2}),
}
PADDINGS = ("none", "left", "right")
TOLERANCE = {"atol": 1e-5, "rtol": 1e-4}


def pair_of(name, extra, kind="CausalLM", implementation="dmattn"):
    """The same random model twice: with eager attention and with ours."""
    config = getattr(transformers, name + "Config")(**{**SMALL, **extra})
    config.decoder_start_token_id = 1
    auto = getattr(transformers, "AutoModelFor" + kind)
    torch.manual_seed(0)
    eager = auto.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    for parameter in eager.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ours = auto.from_config(copy.deepcopy(config), attn_implementation=implementation).eval()
    ours.load_state_dict(eager.state_dict())
    assert (eager.config._attn_implementation, ours.config._attn_implementation) == ("eager", implementation)
    return eager, ours


def padded(padding, rows=15, width=5):
    """tokens [2, rows] and a mask that hides the first or last `width` of the first sequence; no mask for "none"."""
    tokens = torch.randint(3, 97, (2, rows), generator=torch.Generator().manual_seed(7))
    if padding == "none":
        return tokens, None
    mask = torch.ones_like(tokens)
    mask[0, slice(0, width) if padding == "left" else slice(-width, None)] = 0
    return tokens, mask


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_and_gradients(name, padding):
    tokens, mask = padded(padding)
    labels = tokens
    if mask is not None:
        # A row that sees no key gives zero here and the mean of the values in eager: nothing is asked of it.
        labels = tokens.masked_fill(mask * mask.roll(1, -1) == 0, -100)
    results = []
    for model in pair_of(name, DECODERS[name]):
        result = model(tokens, attention_mask=mask, labels=labels)
        result.loss.backward()
        results.append((result, dict(model.named_parameters())))
    (eager, expected), (ours, found) = results
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(ours.logits[real], eager.logits[real], **TOLERANCE)
    for key, parameter in expected.items():
        if parameter.grad is not None:
            torch.testing.assert_close(found[key].grad, parameter.grad, atol=2e-5, rtol=2e-3, msg=key)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", OTHERS)
def test_encoders(name, padding):
    kind, extra = OTHERS[name]
    tokens, mask = padded(padding)
    more = {"decoder_input_ids": tokens[:, :9]} if kind == "Seq2SeqLM" else {}
    eager, ours = (model(tokens, attention_mask=mask, **more).logits for model in pair_of(name, extra, kind))
    real = slice(None) if mask is None or more else mask.bool()
    torch.testing.assert_close(ours[real], eager[real], **TOLERANCE)


def run_with_cache(model, cache, tokens, mask, steps):
    """The logits of every real token, fed in parts of the lengths `steps`."""
    seen, found = 0, []
    for rows in steps:
        part = slice(seen, seen + rows)
        seen += rows
        shown = None if mask is None else mask[:, :seen]
        logits = model(tokens[:, part], attention_mask=shown, past_key_values=cache, use_cache=True).logits
        found.append(logits if mask is None else logits[mask[:, part].bool()])
    return found


@pytest.mark.parametrize("steps", [(9, 1, 1, 1, 1, 1, 1), (9, 4, 1, 1), (1, 1, 13)], ids=str)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_caches(name, kind, steps):
    """Prefill, a second part of several tokens, single tokens; the caches of models with windows are sliding ones."""
    for padding in ("none", "left"):
        tokens, mask = padded(padding)
        models = pair_of(name, DECODERS[name])
        results = []
        for model in models:
            if kind == "dynamic":
                cache = transformers.DynamicCache(config=model.config)
            else:
                cache = transformers.StaticCache(config=model.config, max_cache_len=24)
            with torch.no_grad():
                try:
                    results.append(run_with_cache(model, cache, tokens, mask, steps))
                except (TypeError, ValueError, RuntimeError) as error:
                    if model is not models[0]:
                        raise
                    pytest.skip(f"eager cannot do it: {error}")
        for eager, ours in zip(*results):
            torch.testing.assert_close(ours, eager, **TOLERANCE)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", [*DECODERS, "T5", "Bart"])
def test_generate(name, cache):
    kind, extra = OTHERS.get(name, ("CausalLM", DECODERS.get(name)))
    models = pair_of(name, extra, kind)
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    for padding in ("none", "left"):
        tokens, mask = padded(padding)
        results = []
        for model in models:
            try:
                results.append(
                    model.generate(tokens, attention_mask=mask, cache_implementation=cache, **options)
                )
            except TypeError as error:
                if model is not models[0]:
                    raise
                pytest.skip(f"eager cannot do it: {error}")
        eager, ours = results
        assert torch.equal(eager.sequences, ours.sequences)
        for expected, found in zip(eager.scores, ours.scores):
            torch.testing.assert_close(found, expected, **TOLERANCE)


# ---- the mask that is left out ---------------------------------------------------------------------------------------


@pytest.fixture
def masks_seen(monkeypatch):
    """(mask, kept as a CausalMask without values) of every call of the attention function."""
    seen = []
    forward = integration.flash_dmattn_attention_forward

    def recorded(module, query, key, value, attention_mask, **keywords):
        result = forward(module, query, key, value, attention_mask, **keywords)
        seen.append((attention_mask, isinstance(attention_mask, CausalMask) and attention_mask.stored is None))
        return result

    transformers.AttentionInterface.register("dmattn", recorded)
    yield seen
    transformers.AttentionInterface.register("dmattn", forward)


def test_plain_prefill_and_training_store_no_mask(masks_seen):
    _, model = pair_of("Llama", {})
    tokens, _ = padded("none")
    model(tokens, labels=tokens).loss.backward()
    model(tokens, attention_mask=torch.ones_like(tokens))
    model(tokens, past_key_values=transformers.StaticCache(config=model.config, max_cache_len=40), use_cache=True)
    assert len(masks_seen) == 6 and all(kept for _, kept in masks_seen)


def test_padding_stores_a_mask(masks_seen):
    _, model = pair_of("Llama", {})
    tokens, mask = padded("left")
    model(tokens, attention_mask=mask)
    assert all(type(seen) is torch.Tensor and seen.dtype == torch.bool for seen, _ in masks_seen)


@pytest.mark.parametrize("q_length, kv_length, q_offset", [(5, 5, 0), (5, 12, 0), (1, 7, 0), (1, 7, 6)])
def test_mask_function(q_length, kv_length, q_offset):
    """What it gives means what the mask means that transformers would have built."""
    sizes = {"batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
    built, mask = dmattn_mask(**sizes, allow_is_causal_skip=False), dmattn_mask(**sizes)
    assert type(built) is torch.Tensor
    if mask is None:
        assert q_length == 1 and built.all()
    else:
        assert mask.shape == built.shape and torch.equal(mask.dense(), built)


def attend(mask, rows=5, keys=12, **options):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, rows, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)
    return integration.flash_dmattn_attention_forward(torch.nn.Identity(), q, k, v, mask, **options)[0]


@pytest.mark.parametrize("offset", [0, 3, 7])
def test_causal_mask_as_its_values(offset):
    mask = CausalMask((2, 1, 5, 12), offset, torch.device("cpu"))
    bias = torch.randn(1, 4, 5, 12)
    for options in ({}, {"position_bias": bias}, {"softcap": 2.0}, {"s_aux": torch.randn(4)}):
        expected = attend(mask.dense().clone(), **options)
        kept = CausalMask((2, 1, 5, 12), offset, torch.device("cpu"))
        torch.testing.assert_close(attend(kept, **options), expected)
        assert kept.stored is None


def test_causal_mask_is_a_tensor():
    mask = CausalMask((2, 1, 4, 6), 1, torch.device("cpu"))
    whole = mask.detach()[:, :, :, :9]
    for same in (whole, mask.to("meta"), mask.clone(), copy.deepcopy(mask), mask.to(torch.bool, copy=True), mask.data):
        assert type(same) is CausalMask and same.stored is None and same.offset == 1 and same.shape == mask.shape
    assert mask.stored is None and mask.to("meta").is_meta and mask.contiguous().is_contiguous()
    expected = torch.ones(4, 6).tril(1).bool().expand(2, 1, 4, 6)
    assert torch.equal(torch.where(mask, 1, 0), expected.int()) and torch.equal(mask[:, :, :, :3], expected[..., :3])
    assert mask.stride() == mask.dense().stride() and mask.reshape(-1).sum() == expected.sum() and "True" in repr(mask)
    assert torch.equal(mask & torch.tensor(True), expected) and torch.equal(~mask, ~expected)


def test_a_causal_mask_that_was_written_to_counts_as_written():
    mask = CausalMask((1, 1, 5, 12), 3, torch.device("cpu"))
    changed = mask.dense().clone()
    changed[0, 0, 4, 5] = False
    mask[0, 0, 4, 5] = False
    torch.testing.assert_close(attend(mask), attend(changed))
    assert not torch.equal(attend(mask), attend(CausalMask((1, 1, 5, 12), 3, torch.device("cpu"))))


def test_no_mask_means_what_transformers_means():
    """Without a mask, causal is upper-left: row i sees the keys j <= i, and a single row sees all."""
    first = torch.ones(5, 12).tril().bool().expand(2, 1, 5, 12)
    torch.testing.assert_close(attend(None), attend(first))
    torch.testing.assert_close(attend(None, rows=1), attend(torch.ones(2, 1, 1, 12, dtype=torch.bool), rows=1))
    torch.testing.assert_close(attend(None, is_causal=False), attend(torch.ones(2, 1, 5, 12, dtype=torch.bool)))


@pytest.mark.filterwarnings("ignore")
def test_compiled():
    eager, ours = pair_of("Llama", {})
    tokens, mask = padded("left")
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens).logits, eager(tokens).logits, **TOLERANCE)
        for offset in (0, 3, 7):
            kept = CausalMask((2, 1, 5, 12), offset, torch.device("cpu"))
            torch._dynamo.reset()
            torch.testing.assert_close(torch.compile(attend, backend="aot_eager")(kept), attend(kept.dense()))
    ours.forward = torch.compile(ours.forward, backend="aot_eager")
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    assert torch.equal(ours.generate(tokens, **options), eager.generate(tokens, **options))


# ---- names and refusals ----------------------------------------------------------------------------------------------


def test_names():
    assert integration.NAMES[0] == "dmattn"
    eager, alias = pair_of("Llama", {}, implementation="flash_dmattn")
    tokens, _ = padded("none")
    torch.testing.assert_close(alias(tokens).logits, eager(tokens).logits, **TOLERANCE)


def test_a_model_with_attention_of_its_own_is_refused():
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(ValueError, match="BloomForCausalLM computes attention itself"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dmattn")


@pytest.mark.parametrize("name", ["Llama", "Doge"])
def test_probabilities_are_refused(name):
    """transformers asks for them by an argument, or by the model's configuration."""
    _, model = pair_of(name, DECODERS[name])
    tokens = torch.randint(3, 97, (1, 5))
    with pytest.raises(NotImplementedError, match='output_attentions is True.*use "eager"'):
        model(tokens, output_attentions=True)
    assert model(tokens, output_attentions=False).logits.shape == (1, 5, 97)
    config = getattr(transformers, name + "Config")(**{**SMALL, **DECODERS[name]}, output_attentions=True)
    model = getattr(transformers, name + "ForCausalLM")._from_config(config, attn_implementation="dmattn")
    with pytest.raises(NotImplementedError, match="output_attentions is True"):
        model(tokens)


def test_key_intervals_of_another_length_are_refused():
    q = torch.randn(1, 2, 4, 8)
    attend = lambda pair: integration.flash_dmattn_attention_forward(
        torch.nn.Module(), q, q, q, None, key_intervals=pair, is_causal=True
    )
    attend(flash_dmattn.masks.causal_intervals(4, 4, "torch"))
    with pytest.raises(ValueError, match="made for 3 rows, but the query has 4"):
        attend(flash_dmattn.masks.causal_intervals(3, 4, "torch"))


def test_dropout_is_refused():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="no dropout"):
        integration.flash_dmattn_attention_forward(torch.nn.Identity(), q, q, q, None, dropout=0.1)


@pytest.mark.parametrize("kept", [False, True])
def test_packed_sequences(kept):
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 5, "max_length_k": 5, "is_causal": True}
    forward = integration.flash_dmattn_attention_forward
    mask = CausalMask((1, 1, 9, 9), 0, torch.device("cpu")) if kept else None
    out, _ = forward(torch.nn.Identity(), q, k, v, mask, **packed)
    for first, last in ((0, 4), (4, 9)):
        one = (tensor[:, :, first:last] for tensor in (q, k, v))
        torch.testing.assert_close(out[:, first:last], forward(torch.nn.Identity(), *one, None, is_causal=True)[0])
