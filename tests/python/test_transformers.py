"""test_transformers.py: models of Hugging Face transformers give the same with attn_implementation="flash_dmattn"."""

import pytest
import torch

pytest.importorskip("transformers")

import flash_dmattn.integrations.transformers as integration  # noqa: E402
import transformers  # noqa: E402

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def pair_of(config_class, baseline, name="flash_dmattn", **extra):
    torch.manual_seed(0)
    config = config_class(**{**SMALL, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=baseline).eval()
    other = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
    other.load_state_dict(model.state_dict())
    assert other.config._attn_implementation == name
    return model, other


CASES = [
    (transformers.LlamaConfig, "sdpa", {}),
    (transformers.Gemma2Config, "eager", {"head_dim": 8, "attn_logit_softcapping": 5.0, "sliding_window": 6}),
    (transformers.DogeConfig, "eager", {"keep_window_size": 5}),
    (
        transformers.GptOssConfig,
        "eager",
        {"head_dim": 8, "sliding_window": 6, "num_local_experts": 2, "name": "dmattn", "num_experts_per_tok": 1},
    ),
]


@pytest.mark.parametrize("config_class, baseline, extra", CASES, ids=lambda each: getattr(each, "__name__", ""))
def test_logits_and_gradients(config_class, baseline, extra):
    model, other = pair_of(config_class, baseline, **extra)
    tokens = torch.randint(0, 97, (2, 17))
    padding = torch.ones_like(tokens)
    padding[0, :5] = 0
    for mask in (None, padding):
        outputs = [each(tokens, attention_mask=mask, labels=tokens) for each in (model, other)]
        real = slice(None) if mask is None else mask.bool()
        torch.testing.assert_close(outputs[0].logits[real], outputs[1].logits[real], atol=2e-4, rtol=2e-4)
    model.zero_grad(), other.zero_grad()
    for each in (model, other):
        each(tokens, labels=tokens).loss.backward()
    for (name, a), b in zip(model.named_parameters(), other.parameters()):
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=2e-4, rtol=2e-3, msg=name)


def test_generate_with_cache_and_padding():
    model, other = pair_of(transformers.LlamaConfig, "sdpa")
    tokens = torch.randint(1, 97, (2, 9))
    padding = torch.ones_like(tokens)
    padding[0, :3] = 0
    options = {"attention_mask": padding, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(tokens, **options), other.generate(tokens, **options))


def test_dropout_is_refused():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="no dropout"):
        integration.flash_dmattn_attention_forward(torch.nn.Identity(), q, q, q, None, dropout=0.1)


def test_packed_sequences():
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 5, "max_length_k": 5, "is_causal": True}
    forward = integration.flash_dmattn_attention_forward
    out, _ = forward(torch.nn.Identity(), q, k, v, None, **packed)
    for first, last in ((0, 4), (4, 9)):
        one = (tensor[:, :, first:last] for tensor in (q, k, v))
        torch.testing.assert_close(out[:, first:last], forward(torch.nn.Identity(), *one, None, is_causal=True)[0])
