"""test_distributed.py: DTensors, sharded over batch, over heads, or not, in a group of two processes on the CPU."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")

PROGRAM = '''
import os, sys, torch
from flash_dmattn import _arguments, flash_dmattn_func, flash_dmattn_varlen_func, masks
assert "torch.distributed.tensor" not in sys.modules, "the package imports it by itself"
_arguments.forced_family = os.environ.get("FDM_TEST_FAMILY")
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

def spread(tensor, placement=Replicate(), mesh=mesh):
    return None if tensor is None else distribute_tensor(tensor.detach(), mesh, [placement] * mesh.ndim)

def check(placement, heads_kv, wanted, bias_shape=None, mask=None, intervals=None):
    """Sharded is whole: outputs, gradients, where they lie."""
    torch.manual_seed(0)
    shapes = [(3, 6, 2 * heads_kv, 8), (3, 7, heads_kv, 8), (3, 7, heads_kv, 5), *([bias_shape] if bias_shape else [])]
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    upstream = torch.randn(3, 6, 2 * heads_kv, 5), torch.randn(3, 2 * heads_kv, 6)

    def call(q, k, v, bias, mask, intervals):
        return flash_dmattn_func(q, k, v, mask, bias, is_causal=True, key_intervals=intervals, return_lse=True)

    bias = leaves[3:] or [None]
    outputs = call(*leaves[:3], *bias, mask, intervals)
    gradients = torch.autograd.grad(outputs, leaves, upstream)
    shared = [spread(each, placement).requires_grad_() for each in leaves[:3]]
    shared += [spread(each).requires_grad_() for each in leaves[3:]]
    pair = intervals and tuple(map(spread, intervals))
    got = call(*shared[:3], *(shared[3:] or [None]), spread(mask), pair)
    got_gradients = torch.autograd.grad(got, shared, [spread(each) for each in upstream])
    assert got[0].placements == (wanted,), (placement, got[0].placements)
    for have, want in zip((*got, *got_gradients), (*outputs, *gradients)):
        assert torch.allclose(have.full_tensor(), want, atol=1e-5), (placement, bias_shape)
    return [each.placements[0] for each in got_gradients]

for placement in (Replicate(), Shard(0), Shard(2)):
    for bias_shape in (None, (1, 1, 1, 7), (3, 1, 6, 7), (1, 4, 6, 7), (3, 2, 1, 7)):
        where = check(placement, 2, placement, bias_shape)
        if bias_shape == (1, 1, 1, 7) and placement != Replicate():
            assert where[3] == Partial(), where
check(Shard(0), 2, Shard(0), mask=torch.arange(7).expand(3, 1, 1, 7) < torch.tensor([3, 7, 5])[:, None, None, None])
check(Shard(2), 2, Shard(2), mask=torch.ones(1, 4, 6, 7).tril(1).bool(), intervals=masks.causal_intervals(6, 7))
check(Shard(1), 2, Replicate())  # rows of a sequence are gathered
check(Shard(2), 3, Replicate())  # three KV heads on two ranks: a rank would get a part of a group

q = torch.randn(6, 4, 8)
offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
whole = flash_dmattn_varlen_func(q, q, q, offsets, offsets, 4, 4)
parts, cu = spread(q, Shard(1)), spread(offsets)
assert torch.allclose(flash_dmattn_varlen_func(parts, parts, parts, cu, cu, 4, 4).full_tensor(), whole, atol=1e-6)

torch._dynamo.reset()
def scaled(q, scale):
    return flash_dmattn_func(q, q, q, softmax_scale=scale)

fast = torch.compile(scaled, fullgraph=True, dynamic=True, backend="aot_eager")
dense = torch.randn(2, 6, 4, 8) if rank == 0 else torch.empty(2, 6, 4, 8)
dist.broadcast(dense, 0)
assert torch.allclose(fast(spread(dense, Shard(2)), 0.3).full_tensor(), scaled(dense, 0.3), atol=1e-6)

# Two axes of a mesh: heads are not sharded where a combination of both would cut a group.
flat = init_device_mesh("cpu", (1, 2))
both = [distribute_tensor(dense, flat, [Shard(0), Shard(2)])] * 3
assert flash_dmattn_func(*both).placements == (Shard(0), Shard(2))
dist.destroy_process_group()
'''


def test_two_ranks(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meeting")], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=300)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
