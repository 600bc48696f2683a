"""test_cuda_transformers.py: models of Hugging Face transformers on a CUDA device, ours beside eager attention there, in float32."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import test_doge  # noqa: E402
import test_transformers as on_cpu  # noqa: E402

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: models there are not covered")
MODELS = ["Llama", "Qwen3", "Gemma2", "Gemma3Text", "GptOss", "Doge"]
INTERVALS = "Doge with intervals"
TOLERANCE = {"atol": 3e-5, "rtol": 3e-4}


@pytest.fixture(autouse=True)
def float32_products():
    """Eager attention without TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def models_of(name):
    if name == INTERVALS:
        return [model.to(DEVICE) for model in test_doge.make_pair()]
    return [model.to(DEVICE) for model in on_cpu.pair_of(name, on_cpu.DECODERS[name])]


def tokens_of(name, padding):
    """Doge's choice among equal biases is its own: no token comes twice."""
    draw = test_doge.padded if name in (INTERVALS, "Doge") else on_cpu.padded
    return [None if each is None else each.to(DEVICE) for each in draw(padding)]


@pytest.mark.parametrize("padding", on_cpu.PADDINGS)
@pytest.mark.parametrize("name", [*MODELS, INTERVALS])
def test_logits_and_gradients(name, padding):
    tokens, mask = tokens_of(name, padding)
    labels = tokens if mask is None else tokens.masked_fill(mask * mask.roll(1, -1) == 0, -100)
    results = []
    for model in models_of(name):
        result = model(tokens, attention_mask=mask, labels=labels)
        result.loss.backward()
        results.append((result, dict(model.named_parameters())))
    (eager, expected), (ours, found) = results
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(ours.logits[real], eager.logits[real], **TOLERANCE)
    for key, parameter in expected.items():
        if parameter.grad is not None:
            torch.testing.assert_close(found[key].grad, parameter.grad, atol=1e-4, rtol=5e-3, msg=key)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*MODELS, INTERVALS])
def test_caches(name, kind):
    for padding in ("none", "left"):
        tokens, mask = tokens_of(name, padding)
        results = []
        for model in models_of(name):
            if kind == "dynamic":
                cache = transformers.DynamicCache(config=model.config)
            else:
                cache = transformers.StaticCache(config=model.config, max_cache_len=24)
            with torch.no_grad():
                results.append(on_cpu.run_with_cache(model, cache, tokens, mask, (9, 4, 1, 1)))
        for eager, ours in zip(*results):
            torch.testing.assert_close(ours, eager, **TOLERANCE)


@pytest.mark.parametrize("name", [*MODELS, INTERVALS])
def test_generate(name):
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    options["no_repeat_ngram_size"] = 1  # see tokens_of()
    for padding in ("none", "left"):
        tokens, mask = tokens_of(name, padding)
        eager, ours = (model.generate(tokens, attention_mask=mask, **options) for model in models_of(name))
        assert torch.equal(eager.sequences, ours.sequences)
        for expected, found in zip(eager.scores, ours.scores):
            torch.testing.assert_close(found, expected, **TOLERANCE)
