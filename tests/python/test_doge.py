"""test_doge.py: Doge models with their dynamic mask as key intervals give what they give with eager attention."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.doge.modeling_doge")

import flash_dmattn.integrations.doge as doge  # noqa: E402
from flash_dmattn.integrations.transformers import CausalMask  # noqa: E402

TOLERANCE = {"atol": 1e-5, "rtol": 1e-4}
WINDOW = 5


def config_of(**options):
    return transformers.DogeConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        keep_window_size=WINDOW, **options,
    )  # fmt: skip


def make_pair():
    """The same random model twice: with eager attention, and with intervals."""
    torch.manual_seed(0)
    eager = transformers.DogeForCausalLM._from_config(config_of(), attn_implementation="eager").eval()
    for parameter in eager.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # A is zero in a new model: every bias would be equal
    ours = transformers.DogeForCausalLM._from_config(config_of(), attn_implementation="dmattn").eval()
    ours.load_state_dict(eager.state_dict())
    assert doge.use_key_intervals(ours) is ours
    return eager, ours


@pytest.fixture
def pair():
    return make_pair()


def padded(padding, rows=15, width=4):
    """No token comes twice in a sequence: equal tokens have equal values in the first layer, and so equal biases."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.stack([torch.randperm(94, generator=generator)[:rows] + 3 for _ in range(2)])
    if padding == "none":
        return tokens, None
    mask = torch.ones_like(tokens)
    mask[0, slice(0, width) if padding == "left" else slice(-width, None)] = 0
    return tokens, mask


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_logits_and_gradients(pair, padding):
    tokens, mask = padded(padding)
    labels = tokens if mask is None else tokens.masked_fill(mask * mask.roll(1, -1) == 0, -100)
    results = []
    for model in pair:
        result = model(tokens, attention_mask=mask, labels=labels)
        result.loss.backward()
        results.append((result, dict(model.named_parameters())))
    (eager, expected), (ours, found) = results
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(ours.logits[real], eager.logits[real], **TOLERANCE)
    assert all(layer.self_attn.A.grad.abs().sum() > 0 for layer in pair[1].model.layers)
    for key, parameter in expected.items():
        if parameter.grad is not None:
            torch.testing.assert_close(found[key].grad, parameter.grad, atol=2e-5, rtol=2e-3, msg=key)


def test_the_mask_matters(pair):
    """The window is what hides keys: with a window above the length the logits are others."""
    tokens, _ = padded("none")
    narrow = pair[1](tokens).logits
    for layer in pair[1].model.layers:
        layer.self_attn.keep_window_size = 64
    wide = pair[1](tokens).logits
    torch.testing.assert_close(wide[:, :WINDOW], narrow[:, :WINDOW], **TOLERANCE)
    assert (wide[:, WINDOW:] - narrow[:, WINDOW:]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_caches(pair, kind, padding):
    tokens, mask = padded(padding)
    results = []
    for model in pair:
        if kind == "dynamic":
            cache = transformers.DynamicCache(config=model.config)
        else:
            cache = transformers.StaticCache(config=model.config, max_cache_len=24)
        seen, found = 0, []
        for rows in (9, 4, 1, 1):
            part = slice(seen, seen + rows)
            seen += rows
            shown = None if mask is None else mask[:, :seen]
            with torch.no_grad():
                logits = model(tokens[:, part], attention_mask=shown, past_key_values=cache, use_cache=True).logits
            found.append(logits if mask is None else logits[mask[:, part].bool()])
        results.append(found)
    for eager, ours in zip(*results):
        torch.testing.assert_close(ours, eager, **TOLERANCE)


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate(pair, cache):
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    options["no_repeat_ngram_size"] = 1  # see padded()
    for padding in ("none", "left"):
        tokens, mask = padded(padding)
        eager, ours = (
            model.generate(tokens, attention_mask=mask, cache_implementation=cache, **options) for model in pair
        )
        assert torch.equal(eager.sequences, ours.sequences)
        for expected, found in zip(eager.scores, ours.scores):
            torch.testing.assert_close(found, expected, **TOLERANCE)


def layer_inputs(model, tokens):
    hidden = model.model.embed_tokens(tokens)
    return hidden, model.model.rotary_emb(hidden, torch.arange(tokens.shape[1])[None])


def by_definition(layer, x, position_embeddings, exponential):
    """The layer's output where every row keeps the largest biases of its prefix, of equals the smaller index."""
    batch, rows, _ = x.shape
    q, k, v = (project(x).view(batch, rows, -1, 8) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k, v = (each.transpose(1, 2) for each in (layer.q_norm(q), layer.k_norm(k), v))
    q, k = transformers.models.doge.modeling_doge.apply_rotary_pos_emb(q, k, *position_embeddings)
    bias = layer.A * torch.nn.functional.softplus(layer.dt_proj(v.transpose(1, 2).flatten(2)))
    bias = (bias.exp() if exponential else bias).transpose(1, 2)
    score = q @ k.repeat_interleave(2, 1).transpose(2, 3) * layer.scaling + bias.repeat_interleave(2, 1)[:, :, None]
    for i in range(rows):
        order = torch.sort(bias[..., : i + 1], dim=-1, descending=True, stable=True).indices[..., :WINDOW]
        kept = torch.zeros_like(bias, dtype=torch.bool).scatter(-1, order, True)
        score[:, :, i].masked_fill_(~kept.repeat_interleave(2, 1), -torch.inf)
    out = score.softmax(-1) @ v.repeat_interleave(2, 1)
    return layer.o_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("exponential", [True, False])
@pytest.mark.parametrize("ties", [True, False])
def test_a_layer_is_the_definition(pair, exponential, ties):
    """A new model's A is zero, and all its biases are equal: the first keys stay. torch.topk promises nothing of ties."""
    model = doge.use_key_intervals(pair[1], exponential)
    layer = model.model.layers[0].self_attn
    if ties:
        layer.A.data.zero_()
    with torch.no_grad():
        inputs = layer_inputs(model, padded("none")[0])
        torch.testing.assert_close(layer(*inputs)[0], by_definition(layer, *inputs, exponential), **TOLERANCE)


def test_no_mask_is_stored_without_padding(pair, monkeypatch):
    stored = []
    monkeypatch.setattr(CausalMask, "dense", lambda mask: stored.append(mask))
    tokens, _ = padded("none")
    pair[1](tokens).logits.sum().backward()
    pair[1].generate(tokens, max_new_tokens=3, do_sample=False)
    assert not stored


@pytest.mark.parametrize("rows", [2, 4])
def test_a_prompt_of_as_many_tokens_as_heads(pair, rows):
    """A bias of three axes [B, Hkv, rows] could then be one of rows and keys."""
    tokens, _ = padded("none", rows=rows)
    with torch.no_grad():
        eager, ours = (model(tokens).logits for model in pair)
    torch.testing.assert_close(ours, eager, **TOLERANCE)


def test_probabilities_are_refused(pair):
    with pytest.raises(NotImplementedError, match="output_attentions is True"):
        pair[1](padded("none")[0], output_attentions=True)


def test_refused(pair):
    with pytest.raises(ValueError, match="LlamaForCausalLM has no DogeAttention"):
        doge.use_key_intervals(transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)))
    with pytest.raises(ValueError, match="sliding_window is 6"):
        doge.use_key_intervals(transformers.DogeForCausalLM(config_of(sliding_window=6)))
    pair[1].train()
    pair[1].model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(NotImplementedError, match="attention_dropout is 0.1"):
        pair[1](padded("none")[0])
