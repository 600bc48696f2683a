"""test_continuous_batching.py: requests that transformers batches continuously get the tokens of eager attention alone."""

import copy
import inspect
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.generation.continuous_batching.initialization")

import flash_dmattn.integrations.transformers as integration  # noqa: E402
from flash_dmattn.integrations import _continuous_batching as batching  # noqa: E402
from test_transformers import DECODERS, pair_of  # noqa: E402
from transformers import GenerationConfig  # noqa: E402
from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: E402

# transformers 5.17 calls pages blocks, and knows paged|NAME alone.
PAGE = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
NAMED = "dmattn" if PAGE == "page_size" else "paged|dmattn"
NEW = 7
FULL = ["Llama", "Qwen3"]  # every layer sees all keys: tables and shared pages are possible
MODELS = [*FULL, "Gemma2", "Gemma3Text", "Mistral", "GptOss"]

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def eager_of():
    """name, dtype -> the model with eager attention; each is made once."""
    made = {}

    def model(name, dtype=torch.float32):
        if (name, dtype) not in made:
            # A cap that scores of so small a model reach.
            cap = {"attn_logit_softcapping": 0.2} if name == "Gemma2" else {}
            made[name, dtype] = pair_of(name, {**DECODERS[name], **cap})[0].to(dtype)
        return made[name, dtype]

    return model


def like(eager, implementation):
    """A model of the same weights with another attention."""
    config = copy.deepcopy(eager.config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    model.to(eager.dtype).load_state_dict(eager.state_dict())
    return model


def prompts_of(count, seed=3):
    """Prompts of 1 to 40 tokens; every third one begins with the same 13."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(3, 97, (13,), generator=generator).tolist()
    lengths = torch.randint(1, 28, (count,), generator=generator).tolist()
    own = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]
    return [shared + each if i % 3 == 0 else each for i, each in enumerate(own)]


def options_of(**more):
    return GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **more)


def alone(model, prompt, **more):
    """What the model generates for one prompt without paging."""
    tokens = torch.tensor([prompt])
    model.generation_config.eos_token_id = None  # every request gets all of its tokens
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=options_of(), **more)


def batched(model, prompts, page=4, budget=24, tables=False, returned=1, **more):
    """generate_batch(): chunks of `budget` tokens, pages of `page` keys, with tables of pages or without."""
    config = ContinuousBatchingConfig(
        num_blocks=96, max_batch_tokens=budget, max_blocks_per_request=24 if tables else 0, **{PAGE: page}, **more
    )
    options = options_of()
    options.num_return_sequences = returned  # the check of one in a greedy configuration is generate()'s
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = model.generate_batch(prompts, generation_config=options, continuous_batching_config=config)
    assert len(results) == len(prompts) * returned
    return list(results.values())


def tokens_of(results):
    return [result.generated_tokens for result in results]


def log_probabilities(model, prompt, result):
    """float32 [generated tokens, vocabulary]: what the model gives for a result's tokens in one call."""
    tokens = torch.tensor([prompt + result.generated_tokens])
    with torch.no_grad():
        return model(tokens).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)


def chosen(table, result):
    """Of its tokens, from log_probabilities()."""
    return table.gather(1, torch.tensor(result.generated_tokens)[:, None])[:, 0]


@pytest.fixture
def steps(monkeypatch):
    """(rows, requests, in a table) of each call of our function for the first layer."""
    seen = []
    attend = batching.paged_attention

    def recorded(module, query, key, value, cache, lists, *options):
        if module.layer_idx == 0:
            seen.append((query.shape[2], len(lists["cu_seq_lens_q"]) - 1, lists["block_table"] is not None))
        return attend(module, query, key, value, cache, lists, *options)

    monkeypatch.setattr(batching, "paged_attention", recorded)
    return seen


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.rotates(2)
@pytest.mark.parametrize("tables", [False, True], ids=["lists", "tables"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_eager_attention_alone(name, tables, eager_of, steps):
    """Unlike lengths, prompts in chunks, several requests in a step; windows of 6, softcap and sinks by the model."""
    eager, prompts = eager_of(name), prompts_of(8)
    results = batched(like(eager, NAMED), prompts, tables=tables, return_logprobs=True)
    assert tokens_of(results) == [alone(eager, prompt)[0, len(prompt) :].tolist() for prompt in prompts]
    for prompt, result in zip(prompts, results):
        expected = chosen(log_probabilities(eager, prompt, result), result)
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=2e-5, rtol=1e-4)
    assert max(rows for rows, _, _ in steps) <= 24 < max(map(len, prompts)), "no prompt came in chunks"
    assert any(1 < requests < rows for rows, requests, _ in steps), "no step took chunks and single tokens"
    assert any(table for _, _, table in steps) == (tables and name in FULL), "tables belong to caches of all keys"


@pytest.mark.rotates(2)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "Gemma2"])
def test_control_paged_eager(name, eager_of):
    """transformers' own paged attention says the same of these requests; of Gemma 2 not, as it drops the softcap."""
    eager, prompts = eager_of(name), prompts_of(4)
    assert tokens_of(batched(like(eager, "paged|eager"), prompts)) == tokens_of(batched(like(eager, NAMED), prompts))


@pytest.mark.rotates(2)
@pytest.mark.parametrize("page", [5, 256])
def test_sizes_of_pages(page, eager_of):
    eager, prompts = eager_of("Qwen3"), prompts_of(4)
    expected = [alone(eager, prompt)[0, len(prompt) :].tolist() for prompt in prompts]
    for tables in (False, True):
        assert tokens_of(batched(like(eager, NAMED), prompts, page=page, tables=tables)) == expected


def test_shared_prefixes(eager_of, steps):
    """Requests that begin alike read the pages of the first: fewer rows are computed, and the tokens stay the same."""
    eager = eager_of("Llama")
    first = prompts_of(1)[0] * 3
    prompts = [first + [5 + i] for i in range(4)]
    expected = [alone(eager, prompt)[0, len(prompt) :].tolist() for prompt in prompts]
    rows = {}
    for sharing in (True, False):
        steps.clear()
        budget = len(prompts[0])  # one prompt a step: the next ones find its pages
        assert tokens_of(batched(like(eager, NAMED), prompts, budget=budget, allow_block_sharing=sharing)) == expected
        rows[sharing] = sum(count for count, _, _ in steps)
    assert rows[True] < rows[False] == sum(map(len, prompts)) + len(prompts) * (NEW - 1)


@pytest.mark.skipif(PAGE == "block_size", reason="transformers 5.17 returns the first sequence of a prompt alone")
@pytest.mark.rotates(2)
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_forks(name, eager_of):
    """Several sequences from one prompt: its pages are shared or copied, greedy choice makes them equal."""
    eager, prompts = eager_of(name), prompts_of(3)
    expected = [alone(eager, prompt)[0, len(prompt) :].tolist() for prompt in prompts]
    for tables in (False, True):
        found = tokens_of(batched(like(eager, NAMED), prompts, tables=tables, returned=3))
        assert found == [each for each in expected for _ in range(3)]


@pytest.mark.rotates(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma2", "GptOss"])
def test_16_bits(name, dtype, eager_of):
    """Log-probabilities err by no more than twice as much as eager attention's in the same dtype, beside float32; tokens
    are equal until eager's two best lie closer together than that."""
    low = eager_of(name, dtype)
    true, prompts = like(low, "eager").float(), prompts_of(5)
    for prompt, result in zip(prompts, batched(like(low, NAMED), prompts, return_logprobs=True)):
        exact, rounded = (log_probabilities(model, prompt, result) for model in (true, low))
        allowed = 2 * float((rounded - exact).abs().max()) + torch.finfo(dtype).eps * float(exact.abs().max())
        assert float((torch.tensor(result.logprobs) - chosen(exact, result)).abs().max()) <= allowed
        best = rounded.topk(2)
        for step, token in enumerate(result.generated_tokens):
            margin = float(best.values[step, 0] - best.values[step, 1])
            assert token == int(best.indices[step, 0]) or margin <= 2 * allowed


# ---- names and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [*integration.NAMES, *("paged|" + name for name in integration.NAMES)])
def test_names(implementation, eager_of, steps):
    """Every name is kept while requests run, and is the model's again afterwards."""
    eager, prompts = eager_of("Llama"), prompts_of(2)
    model = like(eager, implementation)
    before = model.config._attn_implementation
    found = tokens_of(batched(model, prompts))
    assert found == [alone(eager, prompt)[0, len(prompt) :].tolist() for prompt in prompts]
    assert steps and model.config._attn_implementation == before
    if before in integration.NAMES:
        assert alone(model, prompts[0])[0, len(prompts[0]) :].tolist() == found[0]


def test_other_names_are_switched_as_before(eager_of, steps):
    eager, prompts = eager_of("Llama"), prompts_of(2)
    found = tokens_of(batched(like(eager, "sdpa"), prompts))
    assert found == [alone(eager, prompt)[0, len(prompt) :].tolist() for prompt in prompts] and not steps


def test_no_mask_of_rows_and_keys_is_built(eager_of, monkeypatch):
    monkeypatch.setattr(integration, "sdpa_mask", lambda *_, **__: pytest.fail("a mask was built"))
    assert len(batched(like(eager_of("Llama"), NAMED), prompts_of(2))) == 2


def test_what_is_refused():
    """A batch without a cache under the names that build no mask; masks, biases and other masks than causal with one."""
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match='no paged cache is given.*attn_implementation="dmattn"'):
        transformers.AttentionInterface()["paged|dmattn"](torch.nn.Module(), q, q, q, None)
    for more in ({"is_causal": False}, {"position_bias": torch.zeros(1, 2, 4, 4)}):
        with pytest.raises(NotImplementedError, match="continuous batching with flash_dmattn is causal"):
            integration.flash_dmattn_attention_forward(torch.nn.Module(), q, q, q, None, cache=object(), **more)
    with pytest.raises(NotImplementedError, match="continuous batching with flash_dmattn is causal"):
        mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
        integration.flash_dmattn_attention_forward(torch.nn.Module(), q, q, q, mask, cache=object())
