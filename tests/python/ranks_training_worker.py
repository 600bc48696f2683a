"""ranks_training_worker.py: one rank of test_ranks_training.py: DTensors, compiled code, FSDP, checkpoint, transformers.

Usage: ranks_training_worker.py RANK RANKS MEETING dtensors|compiled|models|transformers
"""

import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from context_parallel_worker import sentence_of
from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func
from flash_dmattn.context_parallel import ContextParallel, Layout
from torch.utils.checkpoint import checkpoint

ROWS = 48


def close(have, want, what):
    assert have.shape == want.shape and have.dtype == want.dtype, (what, have.shape, want.shape, have.dtype, want.dtype)
    torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


def whole_tensors(heads=4, heads_kv=2, rows=ROWS):
    torch.manual_seed(3)
    return [torch.randn(1, rows, each, 8, dtype=torch.float64).requires_grad_() for each in (heads, heads_kv, heads_kv)]


# ---- DTensors --------------------------------------------------------------------------------------------------------


def run_dtensors(rank, ranks):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "cp"))
    cp = ContextParallel(Layout.contiguous(ROWS, ranks, ROWS // ranks), mesh["cp"], timeout=20)
    whole = whole_tensors()
    bias = torch.randn(1, 4, 1, 1, dtype=torch.float64).requires_grad_()
    keys_bias = torch.randn(1, 2, 1, ROWS, dtype=torch.float64).requires_grad_()
    sink = torch.randn(4, dtype=torch.float64).requires_grad_()
    dout = torch.randn(1, ROWS, 4, 8, dtype=torch.float64)
    for given, placements in ((bias, [Replicate(), Replicate()]), (keys_bias, [Replicate(), Shard(3)])):
        want, want_lse = flash_dmattn_func(*whole, None, given, is_causal=True, sink=sink, return_lse=True)
        wanted = torch.autograd.grad((want, want_lse.sum()), [*whole, given, sink], (dout, torch.ones((), dtype=torch.float64)))
        parts = [distribute_tensor(each.detach(), mesh, [Replicate(), Shard(1)]).requires_grad_() for each in whole]
        scores = distribute_tensor(given.detach(), mesh, placements).requires_grad_()
        sinks = distribute_tensor(sink.detach(), mesh, [Replicate(), Replicate()]).requires_grad_()
        out, lse = cp.flash_dmattn_func(*parts, None, scores, is_causal=True, sink=sinks, return_lse=True)
        assert isinstance(out, DTensor) and out.placements == (Replicate(), Shard(1)) and lse.placements == (Replicate(), Shard(2))
        close(out.full_tensor(), want, "out")
        close(lse.full_tensor(), want_lse, "lse")
        flowing = distribute_tensor(dout, mesh, [Replicate(), Shard(1)])
        (functional.mse_loss(out, out.detach(), reduction="sum") + (out * flowing).sum() + lse.sum()).backward()
        for name, leaf, right in zip(("dq", "dk", "dv", "dbias", "dsink"), (*parts, scores, sinks), wanted):
            close(leaf.grad.full_tensor(), right, name)
        assert isinstance(sinks.grad.placements[1], Partial)
    packed = [distribute_tensor(each.detach()[0], mesh, [Replicate(), Shard(0)]) for each in whole]
    offsets = torch.tensor([0, 20, ROWS], dtype=torch.int32)
    out, lse = cp.flash_dmattn_varlen_func(*packed, offsets, offsets, is_causal=True, return_lse=True)
    want, want_lse = flash_dmattn_varlen_func(*(each[0] for each in whole), offsets, offsets, 28, 28, is_causal=True, return_lse=True)
    close(out.full_tensor(), want.detach(), "packed out")
    close(lse.full_tensor(), want_lse.detach(), "packed lse")
    text = sentence_of(lambda: cp.flash_dmattn_func(*parts[:2], whole[2]), TypeError)
    assert "query, key and value are DTensors, or none is" in text, text
    text = sentence_of(lambda: cp.flash_dmattn_func(*(each.redistribute(placements=[Replicate(), Replicate()]) for each in parts)))
    assert "by which its rows lie on ranks" in text, text


# ---- compiled code ---------------------------------------------------------------------------------------------------


def run_compiled(rank, ranks):
    """One graph, by each algorithm; results and gradients are eager's."""
    layout = Layout.zigzag(ROWS, ranks, 4)
    whole = whole_tensors()
    intervals = (torch.zeros(1, 2, ROWS, dtype=torch.int32), torch.randint(1, ROWS, (1, 2, ROWS), dtype=torch.int32))
    offsets = torch.tensor([0, 7, 30, ROWS], dtype=torch.int32)
    for algorithm in ("gather", "ulysses"):
        cp = ContextParallel(layout, algorithm=algorithm, timeout=20)
        for kind in ("causal", "bias of keys", "bias of rows", "one bias", "intervals", "packed"):
            torch.manual_seed(5)
            shape = {"bias of keys": (1, 4, 1, ROWS), "bias of rows": (1, 1, ROWS, ROWS), "one bias": (1, 4, 1, 1)}.get(kind)
            bias = None if shape is None else torch.randn(shape, dtype=torch.float64)
            if kind == "bias of keys":
                bias = layout.shard(bias, 3, rank)
            elif kind == "bias of rows":
                bias = layout.shard(bias, 2, rank)
            sink = torch.randn(4, dtype=torch.float64)

            def attend(q, k, v, bias, sink, kind=kind, cp=cp):
                q = 2 * q
                if kind == "packed":
                    out, lse = cp.flash_dmattn_varlen_func(q[0], k[0], v[0], offsets, offsets, is_causal=True, sink=sink, return_lse=True)
                    return out.sin(), lse
                more = {"key_intervals": intervals} if kind == "intervals" else {"is_causal": True, "window_size": (20, 0)}
                out, lse = cp.flash_dmattn_func(q, k, v, None, bias, sink=sink, return_lse=True, **more)
                return out.sin(), lse

            found = []
            torch._dynamo.reset()  # kinds are one function, which would be compiled too often
            for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
                mine = [layout.shard(each.detach(), 1, rank).clone().requires_grad_() for each in whole]
                more = [None if each is None else each.clone().requires_grad_() for each in (bias, sink)]
                out, lse = function(*mine, *more)
                (out.sum() + torch.where(lse.isinf(), 0.0, lse).sum()).backward()
                found.append([out, lse, *(each.grad for each in (*mine, *more) if each is not None)])
            for number, (eager, compiled) in enumerate(zip(*found)):
                close(compiled, eager, (algorithm, kind, number))
    attend = torch.compile(lambda q, k, v: cp.flash_dmattn_func(q, k, v), fullgraph=True, backend="aot_eager")
    mine = [layout.shard(each.detach(), 1, rank) for each in whole]
    close(attend(*mine), cp.flash_dmattn_func(*mine), "without gradients")
    torch.library.opcheck(
        torch.ops.flash_dmattn.over_ranks.default,
        (*(each.clone().requires_grad_() for each in mine), *[None] * 10, cp._number, 0, 0, None, True, 0.0, -1, -1, False, False, 0),
    )


# ---- models ----------------------------------------------------------------------------------------------------------


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 16, dtype=torch.float64)
        self.qkv = torch.nn.Linear(16, 48, dtype=torch.float64)
        self.sink = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.out = torch.nn.Linear(16, 32, dtype=torch.float64)

    def layer(self, x, attend):
        q, k, v = self.qkv(x).view(*x.shape[:2], 6, 8).split(2, 2)
        return x + attend(q, k, v, sink=self.sink, is_causal=True).reshape(x.shape)

    def forward(self, tokens, attend, recompute=False):
        x = self.embedding(tokens)
        x = checkpoint(self.layer, x, attend, use_reentrant=False) if recompute else self.layer(x, attend)
        return self.out(x)


def loss_of(logits, labels):
    """Of the rank's rows, divided by the tokens of all."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / ROWS


def run_models(rank, ranks):
    """FSDP2 over the ranks that share a sequence, with and without checkpoints: one rank's gradients."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, tokens = Small(), torch.randint(0, 32, (1, ROWS + 1))
    tokens, labels = tokens[:, :-1], tokens[:, 1:]
    loss = loss_of(model(tokens, flash_dmattn_func), labels)
    loss.backward()
    wanted = {name: each.grad.clone() for name, each in model.named_parameters()}
    layout = Layout.zigzag(ROWS, ranks, 4)
    mine = [layout.shard(each, 1, rank) for each in (tokens, labels)]
    mesh = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    for recompute in (False, True):
        sharded = copy.deepcopy(model)
        sharded.zero_grad()
        fully_shard(sharded, mesh=mesh)
        cp = ContextParallel(layout, mesh, timeout=20)
        part = loss_of(sharded(mine[0], cp.flash_dmattn_func, recompute), mine[1])
        (part * ranks).backward()  # FSDP takes the mean of gradients
        total = part.detach().clone()
        dist.all_reduce(total)
        close(total, loss.detach(), "loss")
        for name, each in sharded.named_parameters():
            close(each.grad.full_tensor(), wanted[name], name)


# ---- transformers ----------------------------------------------------------------------------------------------------


def run_transformers(rank, ranks):
    import transformers
    from flash_dmattn.integrations.transformers import enable_context_parallel, rank_inputs

    shape = dict(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, attn_implementation="dmattn")  # fmt: skip
    torch.manual_seed(0)
    tokens = torch.randint(0, 40, (2, ROWS))
    labels = tokens.clone()
    labels[0, 5:9] = -100
    layout = Layout.zigzag(ROWS, ranks, 4)
    cp = ContextParallel(layout, timeout=60)
    configs = {
        "llama": transformers.LlamaConfig(**shape),
        "windows": transformers.Qwen2Config(**shape, use_sliding_window=True, sliding_window=11, max_window_layers=1),
    }
    for name, config in configs.items():
        one = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dmattn").double()
        many = copy.deepcopy(one)
        want = one(tokens, labels=labels)
        want.loss.backward()
        enable_context_parallel(many, cp)
        for recompute in (False, True):
            many.zero_grad()
            if recompute:
                many.gradient_checkpointing_enable()
                many.train()
            part = many(**rank_inputs(cp, tokens, labels))
            part.loss.backward()
            total = part.loss.detach().clone()
            dist.all_reduce(total)
            torch.testing.assert_close(total, want.loss.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(part.logits, layout.shard(want.logits, 1, rank), rtol=1e-5, atol=1e-5)
            for (where, mine), whole in zip(many.named_parameters(), one.parameters()):
                dist.all_reduce(mine.grad)
                torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-4, atol=1e-6, msg=lambda text: f"{name} {where}: {text}")
    check_packed(one, many, tokens[:1], layout, rank)
    mine = layout.shard(tokens, 1, rank)
    padding = torch.ones_like(mine)
    many(mine, attention_mask=padding)
    padding[0, 0] = 0
    for action, kind, words in (
        (lambda: many(mine, attention_mask=padding), NotImplementedError, "a sequence has no padding"),
        (lambda: many(tokens), ValueError, "the layout gives this rank"),
        (lambda: many(mine, position_ids=torch.zeros_like(mine)), ValueError, "position_ids are not the layout's"),
        (lambda: enable_context_parallel(many, 3), TypeError, "cp is a int"),
    ):
        assert words in sentence_of(action, kind), sentence_of(action, kind)
    eager = transformers.AutoModelForCausalLM.from_config(configs["llama"], attn_implementation="eager")
    assert 'it is "dmattn"' in sentence_of(lambda: enable_context_parallel(eager, cp))
    chunked = transformers.Llama4TextConfig(**{**shape, "num_hidden_layers": 1}, attention_chunk_size=8, num_local_experts=1,
                                            no_rope_layers=[1], layer_types=["chunked_attention"], head_dim=8)  # fmt: skip
    other = transformers.AutoModelForCausalLM.from_config(chunked, attn_implementation="dmattn")
    enable_context_parallel(other, cp)
    assert "a mask is causal or full" in sentence_of(lambda: other(mine), NotImplementedError)
    many(mine)  # a refused call leaves nothing behind
    assert one(tokens).logits.shape == want.logits.shape


def check_packed(one, many, tokens, layout, rank):
    """Packed sequences, whose positions begin anew."""
    offsets = torch.tensor([0, 13, 40, ROWS], dtype=torch.int32)
    positions = torch.cat([torch.arange(int(each)) for each in offsets.diff()])[None]
    longest = {"max_length_q": 27, "max_length_k": 27}
    with torch.no_grad():
        separate = torch.cat([one(tokens[:, a:b]).logits for a, b in zip(offsets.tolist(), offsets.tolist()[1:])], 1)
        have = many(
            layout.shard(tokens, 1, rank), position_ids=layout.shard(positions, 1, rank), cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets, **longest,
        ).logits  # fmt: skip
    torch.testing.assert_close(have, layout.shard(separate, 1, rank), rtol=1e-5, atol=1e-5)


def main():
    rank, ranks, meeting, mode = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + meeting, rank=int(rank), world_size=int(ranks))
    modes = {"dtensors": run_dtensors, "compiled": run_compiled, "models": run_models, "transformers": run_transformers}
    for each in mode.split(","):
        modes[each](int(rank), int(ranks))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
