"""test_compat_clients.py: programs written for flash-attn, on the stand-in: transformers' models, a ring over keys."""

import copy
import inspect
import sys

import pytest
import torch
from conftest import assert_close, truth
from flash_dmattn import compat

transformers = pytest.importorskip("transformers")
from transformers import modeling_flash_attention_utils as flash_utils  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BOTH_KINDS = ["sliding_attention", "full_attention"]
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Qwen3": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "attn_logit_softcapping": 5.0, "sliding_window": 6, "layer_types": BOTH_KINDS},
}
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture(params=[2, 3, 4])
def implementation(request, monkeypatch):
    """flash_attention_N by the stand-in. transformers offers the name beside a CUDA device alone, so the question for
    one is answered here; what it computes runs on the CPU."""
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    monkeypatch.setattr(transformers.PreTrainedModel, "_flash_attn_can_dispatch", lambda *given, **options: True)
    compat.install((request.param,))
    yield f"flash_attention_{request.param}"
    compat.uninstall()


def pair_of(name, extra, implementation):
    """The same random model twice: with eager attention and by flash-attn's name."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **extra})
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    flash = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=implementation).eval()
    flash.load_state_dict(eager.state_dict())
    assert flash.config._attn_implementation == implementation
    return eager, flash


def test_what_transformers_finds(implementation):
    version = int(implementation[-1])
    found = [getattr(import_utils, f"is_flash_attn_{each}_available")() for each in (2, 3, 4)]
    assert found == [each == version for each in (2, 3, 4)]
    assert import_utils.is_flash_attn_greater_or_equal("2.6.3") is (version == 2)


def test_install_after_transformers_and_back():
    """What transformers remembers is cleared both ways; on a machine without a CUDA device the name stays refused."""
    assert "transformers" in sys.modules and not import_utils.is_flash_attn_greater_or_equal("2.3.3")
    compat.install()
    assert import_utils.is_flash_attn_greater_or_equal("2.3.3")
    assert import_utils.is_flash_attn_2_available() is torch.cuda.is_available()
    compat.uninstall()
    assert not import_utils.is_flash_attn_greater_or_equal("2.3.3")


def test_the_map_of_older_transformers(monkeypatch):
    """They keep a dictionary; the entry goes in and out again."""
    mapping = {"flash_attn": ["other"]}
    monkeypatch.setattr(import_utils, "PACKAGE_DISTRIBUTION_MAPPING", mapping, raising=False)
    compat.install((2, 3))
    assert mapping["flash_attn"] == ["flash-attn", "other"] and mapping["flash_attn_interface"] == ["flash-attn-3"]
    compat.uninstall()
    assert mapping == {"flash_attn": ["other"]}


def test_warning_where_an_implementation_is_loaded(monkeypatch):
    monkeypatch.setattr(flash_utils, "_loaded_implementation", "flash_attention_2")
    with pytest.warns(UserWarning, match="has loaded flash_attention_2 before"):
        compat.install()
    compat.uninstall()


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name, padding, implementation):
    eager, flash = pair_of(name, MODELS[name], implementation)
    tokens = torch.randint(3, 97, (2, 19))
    mask = torch.ones(2, 19, dtype=torch.long)
    if padding != "none":
        mask[1, slice(0, 5) if padding == "left" else slice(14, 19)] = 0
    results = [model(tokens, attention_mask=mask).logits for model in (eager, flash)]
    kept = mask.bool()
    used = flash_utils._flash_fn, flash_utils._flash_varlen_fn
    assert all(each.__module__.startswith("flash_dmattn.compat.") for each in used)
    torch.testing.assert_close(results[1][kept], results[0][kept], **CLOSE)
    for logits, model in zip(results, (eager, flash)):
        logits[kept].square().mean().backward()
    for (parameter, want), have in zip(eager.named_parameters(), flash.parameters()):
        torch.testing.assert_close(have.grad, want.grad, **CLOSE, msg=lambda text: f"{parameter}: {text}")


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_generation(name, implementation):
    eager, flash = pair_of(name, MODELS[name], implementation)
    tokens = torch.randint(3, 97, (2, 9))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    given = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(flash.generate(tokens, **given), eager.generate(tokens, **given))


def test_packed_documents(implementation):
    """Positions that begin anew: transformers packs them by cu_seqlens."""
    eager, flash = pair_of("Llama", {}, implementation)
    tokens = torch.randint(3, 97, (1, 12))
    positions = torch.tensor([[*range(5), *range(7)]])
    have = flash(tokens, position_ids=positions).logits
    want = torch.cat([eager(part).logits for part in (tokens[:, :5], tokens[:, 5:])], 1)
    torch.testing.assert_close(have, want, **CLOSE)


def test_sinks_by_flash_attn_2s_name():
    """transformers passes s_aux where the signature has it."""
    functions = compat.flash_attn.flash_attn_func, compat.flash_attn.flash_attn_varlen_func
    for function in (*functions, compat.flash_attn.flash_attn_with_kvcache):
        assert "s_aux" in inspect.signature(function).parameters
    process = flash_utils._lazy_define_process_function(functions[1])
    assert process.keywords["supports_mapping"]["s_aux"] and process.keywords["supports_mapping"]["window_size"]


# ---- a ring over keys ------------------------------------------------------------------------------------------------


def defaults_of(function):
    """As ring attention reads them, to pass everything by name."""
    spec = inspect.getfullargspec(function)
    values = spec.defaults or ()
    return {**dict.fromkeys(spec.args), **dict(zip(spec.args[len(spec.args) - len(values) :], values))}


@pytest.mark.parametrize("causal", [False, True])
def test_ring_of_parts(causal):
    """The forward of each part merged by lse, then the backward of each part with the merged results."""
    forward, backward = (getattr(compat.flash_attn.flash_attn_interface, f"_flash_attn_{way}") for way in ("forward", "backward"))
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, 12, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    common = dict(dropout_p=0, softmax_scale=0.25, window_size_left=-1, window_size_right=-1, softcap=0.0)
    parts = [slice(0, 4), slice(4, 8), slice(8, 12)]
    rank = 2
    rows = q[:, parts[rank]].detach()
    out = lse = None
    for step in range(3):
        part = parts[(rank - step) % 3]
        given = dict(defaults_of(forward), q=rows, k=k[:, part].detach(), v=v[:, part].detach(), **common)
        given.update(causal=causal and step == 0, return_softmax=False)
        block, block_lse, _, _ = forward(**given)
        block, block_lse = block.float(), block_lse.transpose(-2, -1)[..., None]
        if out is None:
            out, lse = block, block_lse
        else:
            out = out - torch.sigmoid(block_lse - lse) * (out - block)
            lse = lse - torch.nn.functional.logsigmoid(lse - block_lse)
    lse = lse.squeeze(-1).transpose(1, 2).contiguous()
    # The rows of the last rank see every key; the causal mask cuts their own part alone.
    want, want_lse, _ = truth(q[:, parts[rank]], k, v, scale=0.25, causal=causal)
    assert_close(out, want, torch.float32, "out")
    assert_close(lse, want_lse, torch.float32, "lse")
    dout = torch.randn_like(out)
    want.backward(dout.double())
    dq = torch.zeros_like(rows)
    for step in range(3):
        part = parts[(rank - step) % 3]
        grads = [torch.empty_like(each) for each in (rows, k[:, part], v[:, part])]
        given = dict(defaults_of(backward), dout=dout, q=rows, k=k[:, part].detach(), v=v[:, part].detach(), out=out)
        given.update(common, softmax_lse=lse, causal=causal and step == 0, deterministic=False)
        given.update(zip(("dq", "dk", "dv"), grads))
        backward(**given)
        dq += grads[0]
        assert_close(grads[1], k.grad[:, part], torch.float32, "dk")
        assert_close(grads[2], v.grad[:, part], torch.float32, "dv")
    assert_close(dq, q.grad[:, parts[rank]], torch.float32, "dq")
