"""test_masks.py: key intervals and dense masks against their definitions."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import assert_close, truth, visible_pairs
from flash_dmattn import flash_dmattn_func, masks


LOWEST = torch.finfo(torch.float32).min


def topk_by_definition(bias, window, seqlen_q, padding=None):
    """[B, h, Sq, Sk]: row i keeps the `window` largest biases of its visible keys; of equals the smaller index."""
    batch, heads, keys = bias.shape
    dense = torch.zeros(batch, heads, seqlen_q, keys, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for i in range(seqlen_q):
                seen = [j for j in range(min(keys, i + keys - seqlen_q + 1)) if padding is None or padding[b, j]]

                def order(j):
                    value = bias[b, h, j].item()
                    return (value != value, -value if value == value else 0.0, j)

                for j in sorted(seen, key=order)[:window]:
                    dense[b, h, i, j] = True
    return dense


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, window", [(9, 9, 3), (9, 9, 1), (5, 12, 4), (12, 5, 2), (8, 8, 50), (1, 7, 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_topk_is_the_definition(seqlen_q, seqlen_k, window, dtype):
    bias = torch.randint(-3, 4, (2, 3, seqlen_k)).to(dtype)  # many equal values
    bias[0, 0, seqlen_k // 2] = torch.nan
    padding = torch.rand(2, seqlen_k) < 0.8
    for keep in (None, padding):
        start, end = masks.topk_intervals(bias, window, seqlen_q, keep)
        assert start.dtype == torch.int32 and start.shape == bias.shape
        dense = masks.intervals_to_mask(start, end, seqlen_q)
        assert torch.equal(dense, topk_by_definition(bias, window, seqlen_q, keep))


def test_topk_of_everything_is_causal():
    bias = torch.randn(1, 2, 1, 6, requires_grad=True)
    start, end = masks.topk_intervals(bias, 6)
    assert not start.requires_grad
    assert torch.equal(masks.intervals_to_mask(start, end, 6)[0, 1], visible_pairs(6, 6, causal=True))


def test_topk_numpy_agrees():
    bias = np.random.default_rng(0).standard_normal((1, 2, 20)).astype("float32")
    padding = np.random.default_rng(1).random((3, 20)) < 0.7
    ours = masks.topk_intervals(bias, 4, 20, padding)
    theirs = masks.topk_intervals(torch.from_numpy(bias), 4, 20, torch.from_numpy(padding))
    for a, b in zip(ours, theirs):
        assert isinstance(a, np.ndarray) and a.shape == (3, 2, 20)
        np.testing.assert_array_equal(a, b.numpy())


def test_topk_attention_is_exact():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 40, 4, 8), torch.randn(2, 40, 2, 8), torch.randn(2, 40, 2, 8)
    bias = torch.randn(2, 2, 40)
    pair = masks.topk_intervals(bias, 5)
    dense = topk_by_definition(bias, 5, 40)
    out = flash_dmattn_func(q, k, v, attn_bias=bias, key_intervals=pair)
    assert_close(out, truth(q, k, v, dense, bias[:, :, None])[0], torch.float32, "out")


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("rows, keys", [(6, 6), (4, 9), (9, 4), (0, 3), (3, 0)])
def test_windows_prefixes_and_causal(library, rows, keys):
    def dense(pair):
        return torch.as_tensor(masks.intervals_to_mask(*pair, rows))[0, 0]

    assert torch.equal(dense(masks.causal_intervals(rows, keys, library)), visible_pairs(rows, keys, True))
    for window in ((-1, -1), (2, 0), (0, 3), (-1, 1), (100, 100)):
        pair = masks.window_intervals(rows, keys, window, library=library)
        assert torch.equal(dense(pair), visible_pairs(rows, keys, False, window))
        pair = masks.window_intervals(rows, keys, window, causal=True, library=library)
        assert torch.equal(dense(pair), visible_pairs(rows, keys, True, window))
    prefix = visible_pairs(rows, keys, True)
    prefix[:, :2] = True
    assert torch.equal(dense(masks.prefix_intervals(rows, keys, 2, library)), prefix)


def test_documents():
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    document = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    same = document[:, None] == document[None]
    whole = masks.intervals_to_mask(*masks.document_intervals(cu, causal=False), 7)[0, 0]
    assert torch.equal(whole, same)
    causal = masks.intervals_to_mask(*masks.document_intervals(cu), 7)[0, 0]
    assert torch.equal(causal, same & visible_pairs(7, 7, True))
    for a, b in zip(masks.document_intervals(cu.numpy()), masks.document_intervals(cu)):
        np.testing.assert_array_equal(a, b.numpy())
    with pytest.raises(ValueError, match="must not fall"):
        masks.document_intervals(torch.tensor([0, 4, 2], dtype=torch.int32))


def test_intervals_and_dense_masks_round_trip():
    start = torch.randint(-2, 6, (2, 3, 11), dtype=torch.int32)
    end = torch.randint(0, 12, (2, 3, 11), dtype=torch.int32)
    dense = masks.intervals_to_mask(start, end, 8)
    pair = masks.intervals_from_mask(dense)
    assert torch.equal(masks.intervals_to_mask(*pair, 8), dense)
    assert masks.intervals_from_mask(dense.numpy().transpose(0, 1, 3, 2)[..., :4].transpose(0, 1, 3, 2)) is not None
    holes = torch.tensor([[True], [False], [True]])
    assert masks.intervals_from_mask(holes) is None and masks.intervals_from_mask(holes.numpy()) is None


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_intervals_to_mask_is_the_definition(lead):
    start = torch.randint(-2, 6, (*lead, 11), dtype=torch.int32)
    end = torch.randint(0, 12, (*lead, 11), dtype=torch.int32)
    row = torch.arange(8)[:, None]
    want = (start[..., None, :] <= row) & (row < end[..., None, :])
    assert torch.equal(masks.intervals_to_mask(start, end, 8), want)
    assert np.array_equal(masks.intervals_to_mask(start.numpy(), end.numpy(), 8), want.numpy())
    with pytest.raises(ValueError, match="they must be of one shape"):
        masks.intervals_to_mask(start, end[..., :3], 8)
    with pytest.raises(ValueError, match="start is int64"):
        masks.intervals_to_mask(start.long(), end, 8)


@pytest.mark.parametrize("rows, keys, block_q, block_k", [(300, 200, 128, 128), (7, 9, 2, 4), (8, 8, 8, 4), (0, 5, 2, 2)])
def test_blocks_say_what_a_mask_shows(rows, keys, block_q, block_k):
    mask = torch.rand(2, 3, rows, keys) < 0.9
    mask[0] = True
    mask[1, 0, : rows // 2] = False
    blocks = masks.mask_blocks(mask, block_q, block_k)
    assert blocks.dtype == torch.uint8 and blocks.shape == (2, 3, -(-rows // block_q), -(-keys // block_k))
    for i in range(blocks.shape[2]):
        for j in range(blocks.shape[3]):
            part = mask[:, :, i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k].flatten(2)
            assert torch.equal(blocks[:, :, i, j], part.any(-1).to(torch.uint8) + part.all(-1).to(torch.uint8))
    assert np.array_equal(masks.mask_blocks(mask.numpy(), block_q, block_k), blocks)
    assert torch.equal(masks.mask_blocks(mask[0, 0], block_q, block_k), blocks[0, 0])
    with pytest.raises(ValueError, match="block_q is 0; it must be at least 1"):
        masks.mask_blocks(mask, 0, 2)


def equal(have, want):
    assert len(have) == len(want) == 2
    for a, b in zip(have, want):
        assert a.dtype == b.dtype == torch.int32 and a.shape == b.shape and torch.equal(a, b)


def test_builders_are_compiled_whole():
    def make(bias):
        return (
            masks.topk_intervals(bias, 3)
            + masks.window_intervals(5, 7, (2, 0), device="cpu")
            + masks.prefix_intervals(5, 7, 2, device="cpu")
        )

    def make_dense(bias):
        mask = masks.create_mask(bias, masks.intervals_to_mask(*masks.topk_intervals(bias, 3), 7), 1, 7, 7, 2, LOWEST)
        return mask, masks.mask_blocks(mask, 2, 2)

    bias = torch.randn(1, 2, 7)
    have = torch.compile(make_dense, fullgraph=True, backend="eager")(bias)
    assert all(torch.equal(a, b) for a, b in zip(have, make_dense(bias)))
    have = torch.compile(make, fullgraph=True, backend="eager")(bias)
    want = make(bias)
    assert all(torch.equal(a, b) for a, b in zip(have, want))


def test_operator_checks():
    offsets, device = torch.tensor([0, 3, 7], dtype=torch.int32), torch.device("cpu")
    masks.document_intervals(offsets)  # the operators are there
    operators = torch.ops.flash_dmattn
    torch.library.opcheck(operators.window_intervals.default, (5, 7, True, 2, 0, device))
    torch.library.opcheck(operators.prefix_intervals.default, (5, 7, 3, device))
    torch.library.opcheck(operators.document_intervals.default, (offsets, True, 7))
    pair = masks.document_intervals(offsets)
    mask = masks.intervals_to_mask(*pair, 7)
    torch.library.opcheck(operators.intervals_to_mask.default, (*pair, 7))
    torch.library.opcheck(operators.mask_blocks.default, (mask, 2, 3))
    torch.library.opcheck(operators.create_mask.default, (torch.randn(1, 2, 1, 7), mask, 3, LOWEST, 2))


class Producer:
    """An array of which only DLPack is known."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_arrays_that_only_speak_dlpack():
    bias, padding = torch.randn(2, 3, 1, 40).to(torch.bfloat16), torch.rand(2, 40) < 0.7
    have = masks.topk_intervals(Producer(bias), 5, 30, Producer(padding))
    equal([torch.from_numpy(each) for each in have], masks.topk_intervals(bias, 5, 30, padding))
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    have = masks.document_intervals(Producer(offsets), seqlen=7)
    equal([torch.from_numpy(each) for each in have], masks.document_intervals(offsets))
    start, end = masks.topk_intervals(bias, 5, 30)
    dense = masks.intervals_to_mask(Producer(start), Producer(end), 30)
    assert np.array_equal(dense, masks.intervals_to_mask(start, end, 30))
    for mask in (padding, padding[:, None, None]):
        have = masks.create_mask(Producer(bias), Producer(mask), 2, 30, 40, 5, -1e9)
        assert np.array_equal(have, masks.create_mask(bias, mask, 2, 30, 40, 5, -1e9))
    with pytest.raises(ValueError, match="seqlen is None"):
        masks.document_intervals(Producer(offsets))
    with pytest.raises(ValueError, match="bias has shape"):
        masks.topk_intervals(Producer(bias[0, 0]), 5)


def test_devices_refused():
    with pytest.raises(ValueError, match="seqlen is 3, but cu_seqlens ends with 2"):
        masks.document_intervals(torch.tensor([0, 2], dtype=torch.int32), seqlen=3)
    with pytest.raises(ValueError, match="library is 'numpy', but device is cuda"):
        masks.causal_intervals(3, 3, "numpy", device="cuda")
    with pytest.raises(NotImplementedError, match="device is meta"):
        masks.causal_intervals(3, 3, device="meta")
    with pytest.raises(NotImplementedError, match="bias is on meta"):
        masks.topk_intervals(torch.empty(1, 1, 3, device="meta"), 2)
    assert masks.causal_intervals(3, 3, device="cpu")[0].device.type == "cpu"


def test_refused():
    with pytest.raises(ValueError, match="window"):
        masks.topk_intervals(torch.randn(1, 1, 4), 0)
    with pytest.raises(ValueError, match="bias has shape"):
        masks.topk_intervals(torch.randn(4, 4), 2)
    with pytest.raises(TypeError, match="it must be a NumPy array or have __dlpack__"):
        masks.topk_intervals([1.0], 2)
    with pytest.raises(TypeError, match="mask is torch.float32"):
        masks.intervals_from_mask(torch.ones(3, 3))


def created_by_definition(bias, mask, window, lowest, block=1, kind="topk"):
    """What 1.2 computes, in tensors: of equal biases the smaller index wins."""
    bias = bias.masked_fill(bias.isnan(), lowest)
    bias = bias if mask is None else torch.where(mask, bias, lowest)
    if kind == "relu":
        keep = bias > 0
    else:
        order = torch.sort(bias + 0, dim=-1, descending=True, stable=True).indices[..., :window]
        keep = torch.zeros_like(bias, dtype=torch.bool).scatter_(-1, order, True) & (bias != lowest)
    for first in range(0, keep.shape[-1], block) if block > 1 else ():
        part = keep[..., first : first + block]
        part[:] = part.sum(-1, keepdim=True) * 2 > part.shape[-1]
    return keep


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_create_mask_is_the_definition(dtype):
    lowest = torch.finfo(dtype).min
    for shape in ((2, 3, 8, 13), (1, 3, 1, 13), (2, 1, 8, 13)):
        bias = (torch.randn(shape) * 3).round().to(dtype) / 2
        bias[..., 4], bias[..., 7], bias[..., 0] = torch.nan, -torch.inf, lowest
        for mask in (None, torch.rand(2, 1, 8, 13) < 0.7, torch.rand(2, 1, 8, 1) < 0.7, torch.rand(1, 3, 1, 13) < 0.7):
            for window, block, kind in ((4, 1, "topk"), (1, 3, "topk"), (40, 1, "topk"), (1, 1, "relu"), (1, 4, "relu")):
                keep = masks.create_mask(bias, mask, 2, 8, 13, window, lowest, block, kind)
                assert torch.equal(keep, created_by_definition(bias, mask, window, lowest, block, kind))


def test_create_mask_takes_the_newest_keys():
    bias = torch.randn(2, 1, 1, 6)
    for rows in (3, 6, 9):
        newest = torch.rand(2, rows) < 0.6
        whole = torch.cat([torch.ones(2, 6, dtype=torch.bool), newest], 1)[:, -6:]
        keep = masks.create_mask(bias, newest, 2, rows, 6, 3, LOWEST)
        assert torch.equal(keep, created_by_definition(bias, whole[:, None, None], 3, LOWEST))


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_create_mask_topk(library):
    torch.manual_seed(0)
    bias, causal = torch.randn(2, 3, 1, 10), visible_pairs(10, 10, True)[None, None]
    if library == "numpy":
        keep = masks.create_mask(bias.numpy(), causal.numpy(), 2, 10, 10, 4, LOWEST)
        assert isinstance(keep, np.ndarray)
        keep = torch.from_numpy(keep)
    else:
        keep = masks.create_mask(bias, causal, 2, 10, 10, 4, LOWEST)
    assert torch.equal(keep, topk_by_definition(bias[:, :, 0], 4, 10))


def test_create_mask_padding_and_relu():
    bias = torch.randn(2, 1, 1, 6)
    padding = torch.tensor([[True, True, False], [True, True, True]])
    whole = torch.cat([torch.ones(2, 3, dtype=torch.bool), padding], 1)
    keep = masks.create_mask(bias, padding, 2, 3, 6, 6, LOWEST)
    assert torch.equal(keep, whole[:, None, None])
    assert torch.equal(
        masks.create_mask(bias, whole, 2, 3, 6, 2, LOWEST, type="relu"), (bias > 0) & whole[:, None, None]
    )


def test_create_mask_blocks():
    bias = torch.tensor([3.0, 2.0, -1.0, 1.0, -2.0, -3.0, 4.0]).reshape(1, 1, 1, 7)
    keep = masks.create_mask(bias, None, 1, 1, 7, 4, LOWEST, block_size=3)
    assert keep.flatten().tolist() == [True, True, True, False, False, False, True]


def test_create_mask_counts_zeros_of_both_signs_as_equal():
    bias = torch.tensor([-0.0, 0.0, -1.0, 0.0]).reshape(1, 1, 1, 4)
    for each in (bias, bias.numpy()):
        keep = torch.as_tensor(masks.create_mask(each, None, 1, 1, 4, 2, LOWEST))
        assert keep.flatten().tolist() == [True, True, False, False]


def test_create_mask_refused():
    bias = torch.randn(1, 1, 1, 6)
    with pytest.raises(ValueError, match="type is 'other'"):
        masks.create_mask(bias, None, 1, 6, 6, 2, LOWEST, type="other")
    with pytest.raises(ValueError, match="block_size is 0"):
        masks.create_mask(bias, None, 1, 6, 6, 2, LOWEST, block_size=0)
    with pytest.raises(ValueError, match="attention_mask has shape"):
        masks.create_mask(bias, torch.ones(1, 5, dtype=torch.bool), 1, 6, 6, 2, LOWEST)


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    np.save(tmp_path / "bias.npy", np.random.default_rng(0).standard_normal((2, 3, 40)).astype(np.float16))
    for name, options in (("a.png", ["--keys", "50", "--bias", "relu"]), ("b.png", ["--load", str(tmp_path / "bias.npy")])):
        command = [sys.executable, "-m", "flash_dmattn.masks", "plot", "--window", "8", "--out", str(tmp_path / name)]
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    done = subprocess.run([sys.executable, "-m", "flash_dmattn.masks", "plot", "--window", "0"], capture_output=True, text=True)
    assert done.returncode == 2 and "at least 1" in done.stderr
