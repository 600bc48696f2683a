"""test_jax.py: flash_dmattn.jax against JAX's own arithmetic in float64: jit, gradients, vmap, shard_map, errors."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402
from flash_dmattn.jax import attention  # noqa: E402

B, SQ, SK, H, HKV, D, DV = 2, 19, 45, 4, 2, 24, 16
ERRORS = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}


def draw(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def tensors(dtype="float32"):
    return draw(1, B, SQ, H, D, dtype=dtype), draw(2, B, SK, HKV, D, dtype=dtype), draw(3, B, SK, HKV, DV, dtype=dtype)


def spread(array, heads=H):
    return np.repeat(array, heads // array.shape[1], 1) if array.shape[1] > 1 else array


def reference(q, k, v, *, mask=None, bias=None, causal=False, softcap=0.0, window=(-1, -1), intervals=None, sink=None):
    """(out, lse) by jax.numpy in the arrays' precision."""
    k, v = (jnp.repeat(each, H // HKV, 2) for each in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") * q.shape[-1] ** -0.5
    scores = softcap * jnp.tanh(scores / softcap) if softcap else scores
    scores = scores if bias is None else scores + jnp.repeat(bias, H // bias.shape[1], 1)
    rows, keys = jnp.arange(SQ)[:, None], jnp.arange(SK)
    seen = jnp.ones((1, 1, SQ, SK), bool) if mask is None else jnp.repeat(mask, H // mask.shape[1], 1)
    last, first = rows + SK - SQ + window[1], rows + SK - SQ - window[0]
    seen = seen & (keys <= rows + SK - SQ) if causal else seen
    seen = seen & (keys <= last) if window[1] >= 0 else seen
    seen = seen & (keys >= first) if window[0] >= 0 else seen
    if intervals is not None:
        start, end = (jnp.repeat(each, H // each.shape[1], 1)[:, :, None] for each in intervals)
        seen = seen & (rows >= start) & (rows < end)
    scores = jnp.where(seen, scores, -jnp.inf)
    if sink is not None:
        tail = jnp.broadcast_to(sink.reshape(1, H, 1, 1), (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, tail], -1)
    lse = jax.nn.logsumexp(scores, -1)
    weights = jnp.exp(scores - lse[..., None])[..., :SK]
    return jnp.einsum("bhij,bjhd->bihd", weights, v, precision="highest"), lse


def features(name):
    """Keyword arguments of attention() and of reference()."""
    mask = jnp.asarray(np.random.default_rng(7).random((B, 1, SQ, SK)) < 0.7).at[..., 0].set(True)
    start = jnp.zeros((B, HKV, SK), jnp.int32)
    end = jnp.where(jnp.arange(SK) < 30, SQ, 0) * jnp.ones((B, HKV, 1), jnp.int32)
    key_bias, full_bias, sink = draw(8, B, HKV, 1, SK), draw(9, 1, H, SQ, SK), draw(10, H)
    return {
        "plain": ({}, {}),
        "causal": ({"is_causal": True}, {"causal": True}),
        "window": ({"window_size": (9, 3)}, {"window": (9, 3)}),
        "softcap": ({"softcap": 2.0}, {"softcap": 2.0}),
        "mask": ({"attn_mask": mask}, {"mask": mask}),
        "bias a key": ({"attn_bias": key_bias, "is_causal": True}, {"bias": key_bias, "causal": True}),
        "bias a pair": ({"attn_bias": full_bias}, {"bias": full_bias}),
        "intervals": ({"key_intervals": (start, end)}, {"intervals": (start, end)}),
        "sink": ({"sink": sink}, {"sink": sink}),
    }[name]


NAMES = ("plain", "causal", "window", "softcap", "mask", "bias a key", "bias a pair", "intervals", "sink")


def close(have, want, error):
    scale = max(1.0, float(jnp.abs(want).max()))
    np.testing.assert_allclose(np.asarray(have, np.float64), np.asarray(want, np.float64), atol=error * scale, rtol=0)


@pytest.mark.rotates(3)
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_gradients(name, dtype):
    given, wanted = features(name)
    dout, dlse = draw(4, B, SQ, H, DV), draw(5, B, H, SQ)
    leaves = dict(zip("qkv", tensors(dtype)))
    extra = {"attn_bias": "bias", "sink": "sink"}
    leaves |= {ours: given[ours] for ours in extra if ours in given}

    def ours(leaves):
        rest = {**given, **{each: leaves[each] for each in extra if each in leaves}}
        out, lse = attention(leaves["q"], leaves["k"], leaves["v"], return_lse=True, **rest)
        return (out.astype(jnp.float32) * dout).sum() + (lse * dlse).sum(), (out, lse)

    def truth(leaves):
        rest = {**wanted, **{extra[each]: leaves[each] for each in extra if each in leaves}}
        out, lse = reference(*(leaves[each].astype(jnp.float32) for each in "qkv"), **rest)
        return (out * dout).sum() + (lse * dlse).sum(), (out, lse)

    gradients, results = jax.jit(jax.grad(ours, has_aux=True))(leaves)
    want, truths = jax.grad(truth, has_aux=True)(leaves)
    for have, true in zip(results, truths):
        close(have, true, ERRORS[dtype])
    assert results[0].dtype == dtype and results[1].dtype == jnp.float32
    for each in leaves:
        assert gradients[each].dtype == leaves[each].dtype and gradients[each].shape == leaves[each].shape
        close(gradients[each], want[each], 4 * ERRORS[dtype])


def test_without_lse_the_gradients_are_the_same():
    q, k, v = tensors()
    dout = draw(4, B, SQ, H, DV)
    first = jax.grad(lambda q: (attention(q, k, v, is_causal=True) * dout).sum())(q)
    second = jax.grad(lambda q: (attention(q, k, v, is_causal=True, return_lse=True)[0] * dout).sum())(q)
    close(first, second, 1e-6)


def test_compiled_and_not_the_bits_are_the_same():
    q, k, v = tensors("bfloat16")
    run = lambda *a: attention(*a, softmax_scale=0.3)  # noqa: E731
    assert (jax.jit(run)(q, k, v) == run(q, k, v)).all()


def test_masks_of_fewer_axes_mean_what_they_mean_elsewhere():
    q, k, v = tensors()
    padding = jnp.arange(SK) < jnp.array([[30], [45]])
    want = attention(q, k, v, padding[:, None, None])
    assert (attention(q, k, v, padding) == want).all()
    key_bias = draw(8, B, HKV, SK)
    assert (attention(q, k, v, attn_bias=key_bias) == attention(q, k, v, attn_bias=key_bias[:, :, None])).all()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="float64 is computed on the CPU only")
def test_float64():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        q, k, v = tensors("float64")
        out, lse = attention(q, k, v, is_causal=True, return_lse=True)
        want, rows = reference(q, k, v, causal=True)
        assert out.dtype == lse.dtype == jnp.float64
        close(out, want, 1e-12)
        close(lse, rows, 1e-12)


def calls_of(function, *arguments):
    """How many custom calls the compiled function has, and whether it has a loop."""
    text = jax.jit(function).lower(*arguments).as_text()
    return text.count("custom_call @flash_dmattn_forward"), "while" in text


@pytest.mark.parametrize("name", ("causal", "mask", "bias a key", "intervals"))
def test_vmap_folds_into_the_batch(name):
    given, _ = features(name)
    q, k, v = tensors()
    many = [jnp.stack([each, each[::-1], -each]) for each in (q, k, v)]
    run = lambda *a: attention(*a, **given)  # noqa: E731
    assert calls_of(jax.vmap(run), *many) == (1, False)
    for n, have in enumerate(jax.vmap(run)(*many)):
        close(have, run(*(each[n] for each in many)), 1e-6)
    nested = [each.reshape(3, 1, *each.shape[1:]) for each in many]
    close(jax.vmap(jax.vmap(run))(*nested)[:, 0], jax.vmap(run)(*many), 1e-6)


@pytest.mark.parametrize("name", ("bias a pair", "sink"))
def test_vmap_of_what_has_no_batch_runs_one_after_the_other(name):
    given, _ = features(name)
    q, k, v = tensors()
    many = jnp.stack([q, 2 * q])
    run = lambda q: attention(q, k, v, **given)  # noqa: E731
    assert calls_of(jax.vmap(run), many)[1]
    for n, have in enumerate(jax.vmap(run)(many)):
        close(have, run(many[n]), 1e-6)


def test_gradients_under_vmap():
    q, k, v = tensors()
    bias = draw(8, B, HKV, 1, SK)
    many = jnp.stack([bias, -bias])
    run = jax.grad(lambda bias: (attention(q, k, v, attn_bias=bias) ** 2).sum())
    for n, have in enumerate(jax.vmap(run)(many)):
        close(have, run(many[n]), 1e-5)


def test_remat_and_scan():
    q, k, v = tensors()
    step = jax.checkpoint(lambda carry, _: (carry + attention(carry, k, k, is_causal=True), None))
    run = lambda q: (jax.lax.scan(step, q, None, 3)[0] ** 2).sum()  # noqa: E731
    plain_step = lambda carry, _: (carry + reference(carry, k, k, causal=True)[0], None)  # noqa: E731
    plain = lambda q: (jax.lax.scan(plain_step, q, None, 3)[0] ** 2).sum()  # noqa: E731
    close(jax.grad(run)(q), jax.grad(plain)(q), 1e-4)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from flash_dmattn.jax import attention
shard_map = jax.shard_map if hasattr(jax, "shard_map") else jax.experimental.shard_map.shard_map
devices = jax.devices()
assert len(devices) == 4, devices
mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "model"))
draw = np.random.default_rng(1)
q, k, v = (jnp.asarray(draw.standard_normal(s), jnp.float32) for s in ((4, 33, 4, 32), (4, 33, 2, 32), (4, 33, 2, 32)))
spec = P("data", None, "model", None)
placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v)]
run = shard_map(lambda q, k, v: attention(q, k, v, is_causal=True), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
out = jax.jit(run)(*placed)
assert out.sharding.spec == spec and (out == attention(q, k, v, is_causal=True)).all()
grads = jax.jit(jax.grad(lambda *a: (run(*a) ** 2).sum(), argnums=(0, 1, 2)))(*placed)
want = jax.grad(lambda *a: (attention(*a, is_causal=True) ** 2).sum(), argnums=(0, 1, 2))(q, k, v)
assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(grads, want))
one = (q, k[:, :, :1], v[:, :, :1])  # one KV head, the same on all devices of "model": its gradient is their sum
run = shard_map(lambda q, k, v: attention(q, k, v), mesh=mesh, in_specs=(spec, P("data"), P("data")), out_specs=spec)
grads = jax.jit(jax.grad(lambda *a: (run(*a) ** 2).sum(), argnums=(0, 1, 2)))(*one)
want = jax.grad(lambda *a: (attention(*a) ** 2).sum(), argnums=(0, 1, 2))(*one)
assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(grads, want))
"""


def test_shards_over_batch_and_heads():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=os.environ | flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bad_input_is_one_sentence():
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"q has 3 axes; it needs 4: \[batch, seqlen, heads, head_dim\]"):
        attention(q[0], k, v)
    with pytest.raises(TypeError, match="k is bfloat16 and q is float32"):
        attention(q, k.astype(jnp.bfloat16), v)
    with pytest.raises(TypeError, match="attn_mask is float32; it must be bool"):
        attention(q, k, v, jnp.ones((SQ, SK)))
    with pytest.raises(ValueError, match="attn_bias has 5 axes; it needs 4"):
        attention(q, k, v, attn_bias=jnp.ones((1, 1, 1, SQ, SK)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="q has 3 heads, which is not a multiple of the 2 heads of k"):
        jax.block_until_ready(attention(q[:, :, :3], k, v))
    with pytest.raises(jax.errors.JaxRuntimeError, match="softcap"):
        jax.block_until_ready(attention(q, k, v, softcap=-1.0))


def test_without_jax_the_module_says_what_to_install(tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('no')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import flash_dmattn.jax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path("/"))
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ImportError: flash_dmattn.jax needs JAX: pip install flash-dmattn[jax]"
