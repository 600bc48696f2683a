"""Attention whose rows lie on several ranks: the functions of one rank, with masks that count global positions."""

from __future__ import annotations

import dataclasses
import datetime
import threading
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._arguments import NO_WINDOW, Settings, at_least, flag_of, num_results_of, refuse_keywords, said
from .._operators import refuse_transforms
from ._agree import Agreement, Health
from ._compiled import attend_compiled, enter
from ._dtensor import has_dtensors, to_local
from ._engine import GRADIENTS
from ._exchange import Messages, Table, make_table
from ._gather import ROWS, Call, GatherAttention
from ._groups import groups_of
from ._heads import moved_operands, returned_gradients
from ._kept import KeptMasks, checksum
from ._pieces import Piece, make_leaves, make_pieces
from ._problem import Given, Problem, problem_given
from ._ranges import Range, Ranges, intersect, size
from ._ring import RingCall, Step, make_steps
from ._sets import choose_sets
from ._ulysses import Exchange, own_heads, to_heads, to_rows, within
from ._visible import Mask, all_keys, hull, needed_keys
from ._whole import WholeKernels
from .layout import Layout

ALGORITHMS = ("auto", "gather", "ulysses", "ring")
BY_KEYS = ("gather", "ring")  # keys travel, and rows stay
KEYS_MODES = ("auto", "needed", "all")
# Problems whose routes are kept: a model has one or two masks.
_MOST_ROUTES = 32
_MOST_AGREED = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class _Route:
    """What of a call depends on layout and mask alone."""

    table: Table
    pieces: List[Piece]
    fetched: List[int]  # of each rank the keys of others that it gets
    leaves: Optional[List[List[Piece]]]  # the pieces, where parts are added by a tree


class ContextParallel:
    """Attention over the ranks of a process group, of which each has the rows that a layout gives it. Collective.

    Keys travel, rows stay: by `gather` each rank fetches the keys that its rows see, a few KV heads at a time, while
    it computes others. By `ulysses` heads are exchanged for rows, so that each rank has all rows of its heads.

    Gradients of q, k, v, and of biases that lie with rows or keys, are whole. Of a sink, and of a bias without rows and
    keys, which all ranks have alike, a rank gets its own part: their sum over ranks is the gradient, as of a model's
    other parameters.

    Args:
        layout: where rows lie. Every rank gives the same.
        group_or_mesh: a process group, a DeviceMesh of one dimension, or one of two: along the first ranks exchange
            heads (Ulysses), along the second they gather keys. Rank r of the layout is rank r of the flattened mesh.
            Default None: all ranks.
        algorithm: "gather", "ulysses", "ring", or "auto", the default: of the first two the one that receives fewer
            bytes. "ring" has the keys of one other rank at a time, and merges float32 parts of results.
        keys: which keys travel. "needed": those that some row of the rank sees. "all". "auto", the default, is
            "needed", but from the first to the last of them where a mask or bias has rows. Key intervals on a CUDA
            device make "needed" wait for the device once a call.
        layout_k: where keys lie; default as rows.
        reproducible_ranks: a power of two M: gradients of key and value have the same bits on 1, 2, 4, .. M ranks, where
            the kernels are deterministic. Layouts are zigzag, with one block for all; rows are computed as on M ranks.
            Default None.
        timeout: seconds, after which a call of a late or dead peer raises RemoteError; default the group's own. With
            NCCL it covers the agreement of ranks, and the process group's watchdog covers the rest.
        check_every_call: whether ranks agree on every call what they are about to do, or only when a rank meets a kind
            of problem for the first time. Default None: on every call for tensors on the CPU.
        same_kernel: whether the rank's calls run the kernel and tile that one rank would choose for the whole problem,
            where they can. Outputs and the gradient of query then have the bits of one rank's call where the layout's
            ranges begin at multiples of the rows that a block of that kernel has (a block of the layout of 512 is
            always one), keys from the first on are needed, and that kernel's backward is deterministic. Default True.
        head_sets: for measurements: how many KV heads travel together, one number a set.
        sm_margin: multiprocessors of a CUDA device that calls leave to copies while keys travel. Default 0.
        memory: bytes of keys of other ranks that a rank may hold at a time. Where gather and ulysses hold more, "auto"
            takes the ring. Default None: no limit.

    Raises:
        ValueError: arguments are wrong, or ranks differ in them.
        RemoteError: a peer is gone or late.

    Examples:
        >>> import torch.distributed as dist
        >>> from flash_dmattn.context_parallel import ContextParallel, Layout
        >>> def train(q, k, v):  # [B, rows of this rank, heads, D], in each of two processes
        ...     cp = ContextParallel(Layout.zigzag(4096, 2), dist.group.WORLD)
        ...     return cp.flash_dmattn_func(q, k, v, is_causal=True)
    """

    def __init__(
        self,
        layout: Layout,
        group_or_mesh: Any = None,
        algorithm: str = "auto",
        keys: str = "auto",
        *,
        layout_k: Optional[Layout] = None,
        reproducible_ranks: Optional[int] = None,
        timeout: Optional[float] = None,
        check_every_call: Optional[bool] = None,
        same_kernel: bool = True,
        head_sets: Optional[Sequence[int]] = None,
        sm_margin: int = 0,
        memory: Optional[int] = None,
    ) -> None:
        _one_of(algorithm, ALGORITHMS, "algorithm")
        _one_of(keys, KEYS_MODES, "keys")
        for each, name in ((layout, "layout"), (layout_k or layout, "layout_k")):
            if not isinstance(each, Layout):
                raise TypeError(f"{name} is {said(each)}; it must be a Layout")
        self.layout, self.layout_k = layout, layout_k or layout
        self.algorithm, self.keys, self.head_sets = algorithm, keys, None if head_sets is None else list(head_sets)
        self.timeout = None if timeout is None else datetime.timedelta(seconds=timeout)
        self.check_every_call = check_every_call
        self.same_kernel = flag_of(same_kernel, "same_kernel")
        self.sm_margin = at_least(0, sm_margin, "sm_margin")
        self.memory = None if memory is None else at_least(0, memory, "memory")
        group, self._heads_group, self._keys_group = groups_of(group_or_mesh)
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.ranks != layout.ranks or self.ranks != self.layout_k.ranks:
            raise ValueError(
                f"the layout has {layout.ranks} ranks (that of keys {self.layout_k.ranks}), but the group has {self.ranks}"
            )
        self._health = Health(self.rank)
        self._number = enter(self)
        self.reproducible_ranks = self._checked_leaves(reproducible_ranks)
        self._lock = threading.Lock()
        self._messages: Dict[torch.device, Messages] = {}
        self._routes: Dict[Any, _Route] = {}
        self._steps: Dict[Any, Tuple[List[Step], List[int]]] = {}
        self._agreed: Dict[str, Dict[str, str]] = {}
        self._masks = KeptMasks()
        self._own_masks: Dict[Mask, Mask] = {}
        self._planned: Dict[Any, WholeKernels] = {}
        self._sets: Dict[Any, List[Range]] = {}
        self._last: Dict[str, Any] = {}
        self._agreement = Agreement(group, self.timeout, self._health)
        self._agreement.check(self._identity())
        self._sublayouts()

    def _identity(self) -> Dict[str, Any]:
        from .. import __version__

        return {
            "version": __version__,
            "layout": self.layout.digest[:16],
            "layout_k": self.layout_k.digest[:16],
            "algorithm": self.algorithm,
            "keys": self.keys,
            "head_sets": self.head_sets,
            "check_every_call": self.check_every_call,
            "same_kernel": self.same_kernel,
            "sm_margin": self.sm_margin,
            "memory": self.memory,
            "reproducible_ranks": self.reproducible_ranks,
        }

    def _sublayouts(self) -> None:
        """The layouts along either dimension of the mesh."""
        heads = dist.get_world_size(self._heads_group) if self._heads_group is not None else 1
        self._num_heads_ranks = heads
        self._keys_rank = dist.get_rank(self._keys_group)
        if heads == 1 and self._keys_group is not None:
            self._outer, self._outer_k = self.layout, self.layout_k
            self._heads_rows = self._heads_keys = None
            return
        columns = self.ranks // heads  # ranks that gather; of the flattened mesh, the second dimension
        column, row = self.rank % columns, self.rank // columns
        members = [[r * columns + c for r in range(heads)] for c in range(columns)]
        self._outer, self._outer_k = (
            Layout([sorted(each for rank in group for each in layout.ranges[rank]) for group in members], layout.block)
            for layout in (self.layout, self.layout_k)
        )
        self._heads_rows, self._heads_keys = (
            self._exchange(self._heads_group, row, within(layout, members[column])) for layout in (self.layout, self.layout_k)
        )

    def _checked_leaves(self, leaves: Optional[int]) -> Optional[int]:
        if leaves is None:
            return None
        leaves = at_least(1, leaves, "reproducible_ranks")
        if leaves & (leaves - 1) or leaves % self.ranks:
            raise ValueError(f"reproducible_ranks is {leaves}; it must be a power of two and a multiple of {self.ranks}")
        if self.layout.leaves(self.rank, leaves) is None or self.layout_k != self.layout:
            raise ValueError("reproducible_ranks is given; rows and keys must lie as Layout.zigzag has them then")
        if self.algorithm == "ulysses" or self._heads_group is not None:
            raise ValueError("reproducible_ranks is given beside ulysses, which has one rank's bits without it")
        if self.algorithm == "ring":
            raise ValueError("reproducible_ranks is given beside the ring, whose parts are those of its ranks")
        return leaves

    def _exchange(self, group: Any, rank: int, layout: Layout) -> Exchange:
        return Exchange(group, rank, layout, self._health, self.timeout)

    # ---- public --------------------------------------------------------------------------------------------------

    def flash_dmattn_func(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Optional[Tensor] = None,
        attn_bias: Optional[Tensor] = None,
        softmax_scale: Optional[float] = None,
        is_causal: Optional[bool] = None,
        softcap: Optional[float] = None,
        deterministic: Optional[bool] = None,
        return_attn_probs: Optional[bool] = None,
        *,
        window_size: Any = NO_WINDOW,
        key_intervals: Any = None,
        document_ids: Optional[Tensor] = None,
        prefix_lengths: Optional[Tensor] = None,
        sink: Optional[Tensor] = None,
        lse_without_sink: bool = False,
        return_lse: bool = False,
        return_lse_low: bool = False,
        scale: Optional[float] = None,
        **others: Any,
    ) -> Any:
        """flash_dmattn_func of the rows of all ranks. Collective: every rank calls it, and so its backward.

        Args:
            query: [B, Sq of this rank, H, D].
            key, value: [B, Sk of this rank, Hkv, D] and [B, Sk of this rank, Hkv, Dv].
            attn_mask, attn_bias: with a row axis, the rank's rows and all keys, [B|1, h, Sq of this rank, Sk]; without,
                the rank's keys, [B|1, h, 1, Sk of this rank].
            key_intervals, document_ids, prefix_lengths: those of all keys, the same on every rank; rows are global.
            sink: the same on every rank.
            return_attn_probs: None or False.
            softmax_scale, is_causal, softcap, deterministic, window_size, lse_without_sink, return_lse,
                return_lse_low, scale, others: as in flash_dmattn_func, and the same on every rank.

        Returns:
            As flash_dmattn_func, of this rank's rows.

        Raises:
            TypeError, ValueError, NotImplementedError: an argument is wrong, on this rank or another, or ranks differ.
            RemoteError: a peer failed, ended or was late. The ContextParallel takes no more calls then.

        Examples:
            >>> def attend(cp, q, k, v):  # on every rank
            ...     return cp.flash_dmattn_func(q, k, v, is_causal=True, return_lse=True)
        """
        if others:
            refuse_keywords("flash_dmattn_func", others)
        masks = window_size, key_intervals, document_ids, prefix_lengths
        given = Given(query, key, value, attn_mask, attn_bias, sink, *masks)
        options = _options(softmax_scale, scale, is_causal, softcap, deterministic, lse_without_sink)
        return self._given(given, options, (return_lse, return_lse_low, return_attn_probs))

    def flash_dmattn_varlen_func(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: Optional[int] = None,
        max_seqlen_k: Optional[int] = None,
        softmax_scale: Optional[float] = None,
        is_causal: Optional[bool] = None,
        softcap: Optional[float] = None,
        deterministic: Optional[bool] = None,
        *,
        window_size: Any = NO_WINDOW,
        key_intervals: Any = None,
        prefix_lengths: Optional[Tensor] = None,
        sink: Optional[Tensor] = None,
        lse_without_sink: bool = False,
        return_lse: bool = False,
        return_lse_low: bool = False,
        scale: Optional[float] = None,
        **others: Any,
    ) -> Any:
        """flash_dmattn_varlen_func of the rows of all ranks; the layout counts rows of the packed tensor. Collective.

        Args:
            query: [total_q of this rank, H, D].
            key, value: [total_k of this rank, Hkv, D] and [total_k of this rank, Hkv, Dv].
            cu_seqlens_q, cu_seqlens_k: int32 [B + 1], of all ranks' rows, the same on every rank.
            max_seqlen_q, max_seqlen_k: not needed. Default None.
            key_intervals: (start, end), int32 [h, total_k] of all keys, rows counted from the start of each sequence.
            softmax_scale, is_causal, softcap, deterministic, window_size, prefix_lengths, sink, lse_without_sink,
                return_lse, return_lse_low, scale, others: as in flash_dmattn_varlen_func, the same on every rank.

        Returns:
            As flash_dmattn_varlen_func, of this rank's rows.

        Raises:
            TypeError, ValueError, NotImplementedError, RemoteError: as in flash_dmattn_func. Masks and biases are not
                taken.

        Examples:
            >>> def attend(cp, q, k, v, cu_seqlens):  # on every rank; cu_seqlens counts the rows of all
            ...     return cp.flash_dmattn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, is_causal=True)
        """
        for name in ("attn_mask", "attn_bias"):
            if others.pop(name, None) is not None:
                raise NotImplementedError(
                    f"{name} is not taken beside packed sequences of several ranks; key_intervals are"
                )
        if others:
            refuse_keywords("flash_dmattn_varlen_func", others)
        masks = window_size, key_intervals, None, prefix_lengths, cu_seqlens_q, cu_seqlens_k
        given = Given(query, key, value, None, None, sink, *masks)
        options = _options(softmax_scale, scale, is_causal, softcap, deterministic, lse_without_sink)
        return self._given(given, options, (return_lse, return_lse_low, None))

    def positions(self, device: Any = None) -> Tensor:
        """The global positions of this rank's rows.

        Args:
            device: where the tensor is made. Default None: PyTorch's.

        Returns:
            int64 [rows of this rank].

        Raises:
            Nothing: it is known.

        Examples:
            >>> def angles(cp, rates):  # of rotary embeddings
            ...     return cp.positions(rates.device)[:, None] * rates
        """
        return self.layout.positions(self.rank, device)

    def explain(self) -> Dict[str, Any]:
        """What the last call did.

        Returns:
            A dictionary: algorithm, why, sets (of KV heads), calls (of kernels a pass), bytes_received (by this rank in
            the forward), and of each rank rows and keys_fetched.

        Raises:
            Nothing: before the first call it is empty.

        Examples:
            >>> def report(cp):
            ...     return cp.explain()["algorithm"], cp.explain()["keys_fetched"]
        """
        return dict(self._last)

    # ---- a call --------------------------------------------------------------------------------------------------

    def _given(self, given: Given, options: Dict[str, Any], wanted: Tuple[Any, ...]) -> Any:
        """options: by the names of settings_of(). wanted: return_lse, return_lse_low and return_attn_probs."""
        distributed = has_dtensors(given)
        if torch.compiler.is_compiling():
            if distributed:
                raise NotImplementedError("DTensors are not taken in compiled code: give their to_local()")
            return attend_compiled(self._number, self.layout.total, given, options, _num_results(*wanted))
        restore: List[Any] = []

        def prepare() -> Tuple[Problem, int]:
            num_results, local = _num_results(*wanted), given
            if distributed:
                local, back = to_local(given, self.group)
                restore.append(back)
            return self._problem(local, local.settings(options)), num_results

        results = _without_batch(self._call(prepare, given), given)
        return restore[0](results) if restore else results

    def _problem(self, given: Given, settings: Settings) -> Problem:
        return problem_given(given, settings, (self.layout, self.layout_k), self.rank, self._masks)

    def _attend_by_operator(self, given: Given, settings: Settings) -> Any:
        """out, lse, lse_low of a call in compiled code."""
        return _without_batch(self._call(lambda: (self._problem(given, settings), 3), given), given)

    def _gradients_by_operator(
        self,
        given: Given,
        settings: Settings,
        results: Sequence[Optional[Tensor]],
        flowing: Sequence[Optional[Tensor]],
        needs: List[bool],
    ) -> List[Optional[Tensor]]:
        """Of query, key, value, attn_bias and sink. Keys travel once more, and heads for rows too."""
        def prepare() -> Tuple[Problem, int]:
            return dataclasses.replace(self._problem(given, settings), needs=needs), 0

        def attend(problem: Problem, _: int) -> Any:
            packed = given.cu_seqlens_q is not None
            tensors = [None if each is None else each[None] if packed else each for each in (*results, *flowing)]
            return self._gradients(problem, tensors[:3], tensors[3:])

        grads = self._call(prepare, given, attend)
        shapes = [getattr(given, name) for name in ("query", "key", "value", "attn_bias", "sink")]
        return [None if grad is None else grad.reshape(like.shape) for grad, like in zip(grads, shapes)]

    def _call(self, prepare: Any, tensors: Sequence[Any], attend: Any = None) -> Any:
        self._health.check()
        refuse_transforms([each for each in tensors if isinstance(each, Tensor)])
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("another call of this ContextParallel is under way; calls of one object are in one order")
        try:
            problem, num_results = self._prepared(prepare)
            return (attend or self._attend)(problem, num_results)
        finally:
            self._lock.release()

    def _prepared(self, prepare: Any) -> Tuple[Problem, int]:
        problem, num_results, failed = None, 0, None
        try:
            problem, num_results = prepare()
            failed = self._refusal(problem)
        except (TypeError, ValueError, NotImplementedError) as error:
            failed = error
        return self._agree(problem, failed), num_results

    def _refusal(self, problem: Problem) -> Optional[Exception]:
        heads_kv = problem.operands.k.shape[2]
        parts = self.ranks if self.algorithm == "ulysses" else self._num_heads_ranks
        if heads_kv % parts:
            return ValueError(f"key has {heads_kv} heads, which {parts} ranks cannot exchange for rows in equal parts")
        if self.algorithm == "ring" and problem.operands.q.dtype is torch.float64 and any(problem.needs_gradient()):
            # The reference computes a row's lse anew, of the keys that a call has.
            return NotImplementedError("query is torch.float64; the ring has no gradients in it")
        return None

    def _agree(self, problem: Optional[Problem], failed: Optional[Exception]) -> Problem:
        """Before bytes move. A rank whose arguments are wrong says so to all."""
        fields = {} if problem is None else problem.fields()
        choices = {} if problem is None else problem.choices()
        text = "" if problem is None else f"{problem.text}{choices}"
        always = self.check_every_call
        if always is None:
            always = problem is None or not problem.operands.q.is_cuda
        chosen = self._agreed.get(text)
        if failed is not None or always or chosen is None:
            if problem is not None and self.check_every_call:
                fields = {**fields, "values of key_intervals": checksum(problem.mask)}
            chosen = self._agreement.check(fields, failed, choices)
            if len(self._agreed) < _MOST_AGREED:
                self._agreed[text] = chosen
        assert problem is not None
        return problem.agreed(chosen)

    def _attend(self, problem: Problem, num_results: int) -> Any:
        algorithm, why = self._choose(problem)
        by_keys = self.layout, self.layout_k, self.rank, 1, algorithm == "ring"
        results = self._gathered(problem, *by_keys) if algorithm in BY_KEYS else self._by_heads(problem)
        self._last.update(algorithm=algorithm, why=why)
        return results[0] if num_results == 1 else tuple(results[:num_results])

    def _messages_on(self, device: torch.device) -> Messages:
        if device not in self._messages:
            self._messages[device] = Messages(self._keys_group, device, self.timeout, self._health)
        return self._messages[device]

    # ---- choice --------------------------------------------------------------------------------------------------

    def _choose(self, problem: Problem) -> Tuple[str, str]:
        """The algorithm, and why; alike on every rank."""
        if self._num_heads_ranks > 1:
            return f"ulysses and {'ring' if self.algorithm == 'ring' else 'gather'}", "the mesh has two dimensions"
        if self.reproducible_ranks:
            return "gather", "sums are those of a tree over ranks"
        if self.algorithm != "auto":
            return self.algorithm, f"{self.algorithm} was asked for"
        _, k, v, *_ = problem.operands
        q, heads_kv = problem.operands.q, k.shape[2]
        fetched = self._route(problem, self.layout, self.layout_k, self.rank).fetched
        by_keys = max(fetched, default=0) * heads_kv * (k.shape[3] + v.shape[3])
        rows = max(self.layout.rows(rank) for rank in range(self.ranks))
        by_heads = rows * (q.shape[2] + heads_kv) * (k.shape[3] + v.shape[3]) * (self.ranks - 1) // self.ranks
        cannot = heads_kv % self.ranks != 0 or problem.has_columns
        sizes = self._bytes_held(problem, fetched)
        memory = sizes["gather"] if self.memory is None else self.memory
        if q.dtype is not torch.float64 and min(sizes["gather"], sizes["gather" if cannot else "ulysses"]) > memory:
            return "ring", f"gather holds {sizes['gather']} bytes of keys of other ranks; memory is {memory}"
        too_large = sizes["gather"] > memory
        if cannot or (by_keys <= by_heads and not too_large):
            return "gather", f"of one row of a batch a rank receives {by_keys} numbers by gather, {by_heads} by ulysses"
        return "ulysses", f"of one row of a batch a rank receives {by_heads} numbers by ulysses, {by_keys} by gather"

    def _bytes_held(self, problem: Problem, fetched: List[int]) -> Dict[str, int]:
        """At a time, beside the rank's own tensors."""
        q, k, v, *_ = problem.operands
        heads = [end - first for first, end in self._sets_of(problem, fetched, self.layout)]
        at_once = max(sum(heads[n : n + 2]) for n in range(len(heads)))  # the next set travels meanwhile
        depth = k.shape[3] + v.shape[3]
        number = q.shape[0] * q.element_size() * depth
        by_heads = max(problem.seqlens) * (q.shape[2] + k.shape[2]) // self.ranks
        return {"gather": max(fetched, default=0) * at_once * number, "ulysses": by_heads * number}

    def _route(self, problem: Problem, layout: Layout, layout_k: Layout, rank: int) -> _Route:
        mask, seqlens, device = problem.mask, problem.seqlens, problem.operands.q.device
        has_rows = problem.has_columns
        which: Any = mask if mask.key_intervals is not None else _named(mask)
        key = (which, has_rows, device, layout.digest)
        if key in self._routes:
            return self._routes[key]
        rows_of = [layout.sorted_ranges(each) for each in range(layout.ranks)]
        needed = all_keys(rows_of, seqlens) if self.keys == "all" else needed_keys(rows_of, mask, seqlens)
        if has_rows or self.reproducible_ranks:
            needed = [hull(each) for each in needed]
        table = make_table(layout_k.ranges, needed, rank)
        leaves = self._leaves(mask, seqlens, needed[rank])
        if leaves is None:
            pieces = make_pieces(layout.ranges[rank], mask, seqlens, needed[rank], device)
        else:
            pieces = [piece for leaf in leaves for piece in leaf]
        route = _Route(table, pieces, _fetched(needed, layout_k), leaves)
        if len(self._routes) >= _MOST_ROUTES:
            self._routes.clear()
        self._routes[key] = route
        return route

    def _leaves(self, mask: Mask, seqlens: Tuple[int, int], needed: Ranges) -> Optional[List[List[Piece]]]:
        if self.reproducible_ranks is None:
            return None
        leaves = self.layout.leaves(self.rank, self.reproducible_ranks)
        assert leaves is not None
        return make_leaves(self.layout.ranges[self.rank], leaves, mask, seqlens, needed)

    # ---- algorithms ----------------------------------------------------------------------------------------------

    def _gather_call(self, problem: Problem, layout: Layout, layout_k: Layout, rank: int, heads_ranks: int) -> Call:
        """heads_ranks: of how many ranks each has as many heads as these operands."""
        route = self._route(problem, layout, layout_k, rank)
        messages, fetched = self._messages_on(problem.operands.q.device), route.fetched
        sets = self._sets_of(problem, fetched, layout)
        kernels = self._kernels(problem, heads_ranks) if self.same_kernel else None
        moves = any(fetched)
        self._last = {
            "sets": sets,
            "rows": [layout.rows(each) for each in range(layout.ranks)],
            "keys_fetched": fetched,
            "calls": len(route.pieces) * len(sets),
        }
        kinds, margin = (problem.mask_kind, problem.bias_kind), self.sm_margin if moves else 0
        return Call(
            messages, route.table, route.pieces, sets, problem.settings, *kinds, moves, route.leaves, kernels, margin
        )

    def _ring_call(self, problem: Problem, layout: Layout, layout_k: Layout, rank: int) -> RingCall:
        which: Any = problem.mask if problem.mask.key_intervals is not None else _named(problem.mask)
        key = ("ring", which, problem.has_columns, problem.operands.q.device, layout.digest)
        mask, seqlens = problem.mask, problem.seqlens
        if key not in self._steps:
            rows_of = [layout.sorted_ranges(each) for each in range(layout.ranks)]
            needed = all_keys(rows_of, seqlens) if self.keys == "all" else needed_keys(rows_of, mask, seqlens)
            if len(self._steps) >= _MOST_ROUTES:
                self._steps.clear()
            layouts = layout, layout_k
            steps = make_steps(layouts, needed, mask, rank, problem.has_columns, problem.operands.q.device)
            self._steps[key] = steps, _fetched(needed, layout_k)
        steps, fetched = self._steps[key]
        self._last = {
            "sets": [(0, problem.operands.k.shape[2])],
            "rows": [layout.rows(each) for each in range(layout.ranks)],
            "keys_fetched": fetched,
            "calls": sum(len(fold) for step in steps for fold in step.folds),
        }
        margin = self.sm_margin if any(fetched) else 0
        messages, kinds = self._messages_on(problem.operands.q.device), (problem.mask_kind, problem.bias_kind)
        return RingCall(messages, steps, problem.settings, *kinds, margin)

    def _call_by_keys(
        self, problem: Problem, layout: Layout, layout_k: Layout, rank: int, heads_ranks: int, ring: bool
    ) -> Any:
        """heads_ranks: of how many ranks each has as many heads as these operands."""
        if ring:
            return self._ring_call(problem, layout, layout_k, rank)
        return self._gather_call(problem, layout, layout_k, rank, heads_ranks)

    def _gathered(self, problem: Problem, *by_keys: Any) -> List[Any]:
        call = self._call_by_keys(problem, *by_keys)
        q, k, v, mask, bias, *_ = problem.operands
        sink = problem.operands.sink
        attend: Any = GatherAttention
        before = call.messages.bytes_received
        out, lse, low = attend.apply(call, mask, q, k, v, bias, sink)
        self._last["bytes_received"] = call.messages.bytes_received - before
        return [out, lse, low if bias is not None else None]

    def _sets_of(self, problem: Problem, fetched: List[int], layout: Layout) -> List[Range]:
        key = (problem.text, problem.bias_kind, tuple(fetched), layout.ranks)
        if key not in self._sets:
            if len(self._sets) >= _MOST_ROUTES:
                self._sets.clear()
            self._sets[key] = choose_sets(problem, fetched, layout, self.head_sets, self.keys != "all")
        return self._sets[key]

    def _kernels(self, problem: Problem, heads_ranks: int) -> WholeKernels:
        key = (problem.text, problem.mask_kind, problem.bias_kind, heads_ranks)
        if key not in self._planned:
            if len(self._planned) >= _MOST_ROUTES:
                self._planned.clear()
            self._planned[key] = WholeKernels(problem, heads_ranks)
        return self._planned[key]

    def _ways_to_heads(self) -> Tuple[Exchange, Exchange, Tuple[Any, ...]]:
        """The exchanges of rows and of keys, and what the gather over these heads is told."""
        exchange_q, exchange_k = self._heads_rows, self._heads_keys
        outer, outer_k, rank = self._outer, self._outer_k, self._keys_rank
        if exchange_q is None or exchange_k is None:  # of all ranks, where ulysses was chosen for a group
            exchange_q, exchange_k = (
                self._exchange(self.group, self.rank, within(layout, range(self.ranks)))
                for layout in (self.layout, self.layout_k)
            )
            outer, outer_k, rank = _alone(self.layout), _alone(self.layout_k), 0
        return exchange_q, exchange_k, (outer, outer_k, rank, exchange_q.ranks, self.algorithm == "ring")

    def _by_heads(self, problem: Problem) -> List[Any]:
        """Heads for rows along the group of heads; then keys along that of keys, which may be this rank alone."""
        exchange_q, exchange_k, by_keys = self._ways_to_heads()
        moved = moved_operands(problem, exchange_q, exchange_k)
        inner = dataclasses.replace(problem, operands=moved, mask=self._own_mask(problem.mask, exchange_q))
        results = self._gathered(inner, *by_keys)
        out = to_rows(results[0], exchange_q, 1, 2)
        return [out, *(None if each is None else to_rows(each, exchange_q, 2, 1) for each in results[1:])]

    def _gradients(
        self, problem: Problem, results: Sequence[Optional[Tensor]], flowing: Sequence[Optional[Tensor]]
    ) -> List[Optional[Tensor]]:
        """Gradients without autograd, of what forward gave and what flows into it."""
        needs = dict(zip(GRADIENTS, problem.needs_gradient()))
        algorithm, _ = self._choose(problem)
        out, lse, low = results
        dout, dlse = flowing
        assert out is not None and lse is not None
        dout = torch.zeros_like(out) if dout is None else dout if dout.stride(-1) == 1 else dout.contiguous()
        if algorithm in BY_KEYS:
            call = self._call_by_keys(problem, self.layout, self.layout_k, self.rank, 1, algorithm == "ring")
            grads: List[Optional[Tensor]] = call.backward(problem.operands, results, (dout, dlse), needs)
            return grads
        exchange_q, exchange_k, by_keys = self._ways_to_heads()
        moved = moved_operands(problem, exchange_q, exchange_k)
        inner = dataclasses.replace(problem, operands=moved, mask=self._own_mask(problem.mask, exchange_q))
        known = to_heads(out, exchange_q, 1, 2), *(each if each is None else to_heads(each, exchange_q, 2, 1) for each in (lse, low))
        above = to_heads(dout, exchange_q, 1, 2), None if dlse is None else to_heads(dlse, exchange_q, 2, 1)
        grads = self._call_by_keys(inner, *by_keys).backward(moved, known, above, needs)
        return returned_gradients(problem, grads, exchange_q, exchange_k)

    def _own_mask(self, mask: Mask, exchange: Exchange) -> Mask:
        """What of a mask is of the rank's heads."""
        if mask.key_intervals is None:
            return mask
        if mask not in self._own_masks:
            if len(self._own_masks) >= _MOST_ROUTES:
                self._own_masks.clear()
            three = (each.reshape(*[1] * (3 - each.dim()), *each.shape) for each in mask.key_intervals)
            pair: Any = tuple(own_heads(each, 1, exchange) for each in three)
            self._own_masks[mask] = dataclasses.replace(mask, key_intervals=pair)
        return self._own_masks[mask]


def _without_batch(results: Any, given: Given) -> Any:
    """Of a packed call, whose tensors have a batch of one inside."""
    if given.cu_seqlens_q is None:
        return results
    if isinstance(results, Tensor):
        return results[0]
    return tuple(None if each is None else each[0] for each in results)


def _named(mask: Mask) -> Any:
    """What tells masks without key intervals apart."""
    return mask.is_causal, tuple(mask.window_size)


def _fetched(needed: Sequence[Ranges], layout_k: Layout) -> List[int]:
    """Of each rank the keys of others that it gets."""
    return [size(each) - size(intersect(each, sorted(own))) for each, own in zip(needed, layout_k.ranges)]


def _alone(layout: Layout) -> Layout:
    return Layout([[(0, layout.total)]], layout.block)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _one_of(value: Any, allowed: Sequence[str], name: str) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {said(value)}; it must be one of {', '.join(allowed)}")


def _options(
    softmax_scale: Any, scale: Any, is_causal: Any, softcap: Any, deterministic: Any, lse_without_sink: Any
) -> Dict[str, Any]:
    return {
        "softmax_scale": softmax_scale,
        "scale": scale,
        "is_causal": is_causal,
        "softcap": softcap,
        "deterministic": deterministic,
        "lse_without_sink": lse_without_sink,
    }


def _num_results(return_lse: Any, return_lse_low: Any, return_attn_probs: Any) -> int:
    if flag_of(return_attn_probs, "return_attn_probs"):
        raise NotImplementedError("return_attn_probs is not offered over several ranks")
    return num_results_of(flag_of(return_lse, "return_lse"), flag_of(return_lse_low, "return_lse_low"), False)
