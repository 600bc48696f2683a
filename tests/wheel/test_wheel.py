"""test_wheel.py: the package as installed, without torch: NumPy arrays against float64 NumPy, and the tool."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import flash_dmattn
import numpy as np
import pytest
from flash_dmattn import attention, attention_backward

# Programs that a test starts. scripts/wheels.py names its own where Python itself runs under an emulator.
PYTHON = os.environ.get("FDM_PYTHON", sys.executable)
TOOL = os.environ.get("FDM_TOOL") or str(pathlib.Path(sysconfig.get_paths()["scripts"]) / "fdm")


def softmax_weights(q, k, scale, visible):
    """[B, H, Sq, Sk] in float64 of q [B, Sq, H, D] and k [B, Sk, Hkv, D]; 0 in rows that see nothing."""
    k = np.repeat(k.astype(np.float64), q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k) * scale
    scores = np.where(visible, scores, -np.inf)
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(most), most, 0))
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)


def problem(dtype, seed=3, rows=19, keys=45, heads=4, heads_kv=2, dim=40):
    draw = np.random.default_rng(seed)
    shapes = [(2, rows, heads, dim), (2, keys, heads_kv, dim), (2, keys, heads_kv, dim), (2, rows, heads, dim)]
    return [draw.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype, error", [(np.float32, 2e-5), (np.float16, 4e-3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_forward_and_backward_are_float64s(dtype, error, is_causal):
    q, k, v, dout = problem(dtype)
    rows, keys, scale = q.shape[1], k.shape[1], q.shape[3] ** -0.5
    visible = np.arange(keys) <= np.arange(rows)[:, None] + keys - rows if is_causal else np.ones((rows, keys), bool)
    weights = softmax_weights(q, k, scale, visible)
    spread_k, spread_v = (np.repeat(x.astype(np.float64), 2, axis=2) for x in (k, v))
    out, lse = attention(q, k, v, is_causal=is_causal, return_lse=True)
    want = np.einsum("bhij,bjhd->bihd", weights, spread_v)
    np.testing.assert_allclose(out, want, atol=error)

    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, is_causal=is_causal)
    dp = np.einsum("bihd,bjhd->bhij", dout.astype(np.float64), spread_v)
    ds = weights * (dp - (weights * dp).sum(-1, keepdims=True)) * scale
    fold = lambda x: x.reshape(2, keys, 2, 2, -1).sum(3)  # noqa: E731: the heads of a group
    np.testing.assert_allclose(dq, np.einsum("bhij,bjhd->bihd", ds, spread_k), atol=8 * error)
    np.testing.assert_allclose(dk, fold(np.einsum("bhij,bihd->bjhd", ds, q.astype(np.float64))), atol=8 * error)
    np.testing.assert_allclose(dv, fold(np.einsum("bhij,bihd->bjhd", weights, dout.astype(np.float64))), atol=8 * error)


def test_a_mask_hides_its_keys():
    q, k, v, _ = problem(np.float32)
    mask = np.random.default_rng(1).random((2, 1, q.shape[1], k.shape[1])) < 0.4
    want = np.einsum("bhij,bjhd->bihd", softmax_weights(q, k, 0.25, mask), np.repeat(v.astype(np.float64), 2, axis=2))
    np.testing.assert_allclose(attention(q, k, v, mask, softmax_scale=0.25), want, atol=2e-5)


def test_key_intervals_see_the_keys_that_they_name():
    q, k, v, _ = problem(np.float32)
    begin = np.zeros((2, 1, k.shape[1]), np.int32)
    end = np.full_like(begin, q.shape[1])
    begin[:, :, 30:] = end[:, :, 30:] = 0  # hidden from every row
    seen = np.arange(k.shape[1]) < 30
    want = np.einsum("bhij,bjhd->bihd", softmax_weights(q, k, 0.25, seen), np.repeat(v.astype(np.float64), 2, axis=2))
    np.testing.assert_allclose(attention(q, k, v, softmax_scale=0.25, key_intervals=(begin, end)), want, atol=2e-5)


def test_bad_input_is_one_sentence():
    q, k, v, _ = problem(np.float32)
    with pytest.raises(ValueError, match="head") as caught:
        attention(q[:, :, :3], k, v)
    assert "\n" not in str(caught.value)


def test_a_library_of_another_system_is_one_sentence(tmp_path):
    package = tmp_path / "flash_dmattn"
    shutil.copytree(pathlib.Path(flash_dmattn.__file__).parent, package)
    for module in package.glob("_native*"):
        module.write_bytes(b"of another system")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import flash_dmattn"
    told = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    last = told.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: the compiled part of flash_dmattn cannot be loaded here"), told.stderr


def test_torch_was_not_needed():
    code = "import sys; from flash_dmattn import attention, masks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([PYTHON, "-c", code]).returncode == 0


def test_the_tool_came_along():
    done = subprocess.run([TOOL, "info", "--json"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("{"), done.stderr
