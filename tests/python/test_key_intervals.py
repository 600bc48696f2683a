"""test_key_intervals.py: masks.KeyIntervals, the pair that knows for how many rows it was made."""

import copy
import pickle

import numpy as np
import pytest
import torch
from conftest import assert_close, truth
from flash_dmattn import attention, attention_backward, flash_dmattn_func, flash_dmattn_varlen_func, masks
from flash_dmattn.masks import KeyIntervals
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint


def builders(rows, keys, library):
    bias = torch.randn(1, 2, keys)
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    offsets = torch.tensor([0, 2, keys], dtype=torch.int32)
    if library == "numpy":
        bias, mask, offsets = bias.numpy(), mask.numpy(), offsets.numpy()
    return {
        "topk": masks.topk_intervals(bias, 3, rows),
        "window": masks.window_intervals(rows, keys, (3, 0), library=library),
        "causal": masks.causal_intervals(rows, keys, library),
        "prefix": masks.prefix_intervals(rows, keys, 2, library),
        "from_mask": masks.intervals_from_mask(mask),
        "documents": masks.document_intervals(offsets),
    }


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_every_builder_says_its_rows(library):
    for name, pair in builders(7, 7, library).items():
        assert type(pair) is KeyIntervals and pair.seqlen_q == 7, name
        start, end = pair
        assert start is pair.start is pair[0] and end is pair.end is pair[1] and len(pair) == 2
        assert isinstance(start, np.ndarray if library == "numpy" else torch.Tensor)
        assert isinstance(pair, tuple) and "seqlen_q=7" in repr(pair)
    for name, pair in builders(4, 7, library).items():
        assert pair.seqlen_q == (7 if name == "documents" else 4), name
    assert masks.topk_intervals(torch.randn(1, 1, 6), 2).seqlen_q == 6


def calls(rows, keys):
    q, k = torch.randn(1, rows, 2, 8), torch.randn(1, keys, 2, 8)
    arrays = q.numpy(), k.numpy(), k.numpy()
    out, lse = attention(*arrays, return_lse=True)
    return {
        "torch": lambda pair: flash_dmattn_func(q, k, k, key_intervals=pair),
        "numpy": lambda pair: attention(
            *arrays,
            key_intervals=[each.numpy() for each in pair]
            if type(pair) is tuple
            else KeyIntervals(*(each.numpy() for each in pair), pair.seqlen_q),
        ),
        "backward": lambda pair: attention_backward(out, *arrays, out, lse, key_intervals=pair),
        "probabilities": lambda pair: flash_dmattn_func(q, k, k, key_intervals=pair, return_attn_probs=True),
    }


@pytest.mark.parametrize("name", ["torch", "numpy", "backward", "probabilities"])
def test_a_decode_step_refuses_intervals_of_the_prompt(name):
    """A row of a decode step would see one key of eight."""
    bias = torch.randn(1, 2, 8)
    step, prompt = calls(1, 8)[name], masks.topk_intervals(bias, 8)
    with pytest.raises(ValueError, match=r"made for 8 rows, but the query has 1: make them with seqlen_q=1"):
        step(prompt)
    step(masks.topk_intervals(bias, 8, seqlen_q=1))
    step(tuple(prompt))  # plain arrays are taken as they are
    step(KeyIntervals(*prompt))
    calls(8, 8)[name](prompt)


def test_the_right_rows_see_the_right_keys():
    bias = torch.randn(1, 2, 8)
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 8, 2, 8)
    pair = masks.topk_intervals(bias, 4, 3)
    assert_close(
        flash_dmattn_func(q, k, k, key_intervals=pair), truth(q, k, k, intervals=pair)[0], torch.float32, "out"
    )


def test_packed_calls_compare_with_their_longest_sequence():
    q, offsets = torch.randn(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    start, end = torch.zeros(1, 7, dtype=torch.int32), torch.full((1, 7), 9, dtype=torch.int32)
    call = lambda pair: flash_dmattn_varlen_func(q, q, q, offsets, offsets, 4, 4, key_intervals=pair)
    want = call((start, end))
    assert torch.equal(call(KeyIntervals(start, end, 4)), want) and torch.equal(call(KeyIntervals(start, end)), want)
    with pytest.raises(ValueError, match="made for 5 rows, but the query has 4"):
        call(KeyIntervals(start, end, 5))


def test_it_survives_what_pairs_go_through():
    pair = masks.causal_intervals(5, 7, "torch")
    for other in (pickle.loads(pickle.dumps(pair)), copy.deepcopy(pair), copy.copy(pair)):
        assert type(other) is KeyIntervals and other.seqlen_q == 5 and all(map(torch.equal, pair, other))
    for remade in (_pytree.tree_map(torch.clone, pair), KeyIntervals._make(pair), pair._replace(end=pair.end)):
        assert type(remade) is KeyIntervals and remade.seqlen_q is None and all(map(torch.equal, pair, remade))


def test_gradients_and_checkpoint():
    q, k = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(2))
    pair = masks.window_intervals(5, 5, (2, 0), library="torch")
    attend = lambda q, k, pair: flash_dmattn_func(q, k, k, key_intervals=pair)
    want = torch.autograd.grad(attend(q, k, tuple(pair)).square().sum(), (q, k))
    for out in (attend(q, k, pair), checkpoint(attend, q, k, pair, use_reentrant=False)):
        assert all(map(torch.equal, torch.autograd.grad(out.square().sum(), (q, k)), want))


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_code_makes_takes_and_gives_them(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    make = compiled(lambda bias, rows: masks.topk_intervals(bias, 3, rows))
    take = compiled(lambda q, pair: flash_dmattn_func(q, q, q, key_intervals=pair))
    for rows in (5, 6, 7):
        bias, q = torch.randn(1, 2, rows), torch.randn(1, rows, 2, 8)
        pair, want = make(bias, rows), masks.topk_intervals(bias, 3)
        assert type(pair) is KeyIntervals and pair.seqlen_q == rows and all(map(torch.equal, pair, want))
        assert torch.equal(take(q, pair), flash_dmattn_func(q, q, q, key_intervals=want))
    loose = torch.compile(lambda q, pair: flash_dmattn_func(q, q, q, key_intervals=pair), backend="aot_eager")
    with pytest.raises(ValueError, match="seqlen_q=6"):
        loose(torch.randn(1, 6, 2, 8), masks.causal_intervals(5, 6, "torch"))
