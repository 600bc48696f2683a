"""Agreement of ranks: each says what it is about to do, and a difference is one sentence on all, before bytes move."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import weakref
from typing import Any, Dict, Iterator, List, Optional, Sequence

import torch
import torch.distributed as dist

# Of a header; a longer one is cut to digests of its values. Unlike sizes would end a process of gloo's.
HEADER_BYTES = 4096


class RemoteError(RuntimeError):
    """A peer failed, ended, or was late; results are undefined, and the ContextParallel takes no more calls.

    Args:
        sentence: what happened.

    Raises:
        Nothing: it is raised by others.

    Examples:
        >>> from flash_dmattn.context_parallel import RemoteError
        >>> issubclass(RemoteError, RuntimeError)
        True
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)


class Health:
    """Whether peers have answered so far."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.broken: Optional[str] = None

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Around what waits for peers, and nothing else: their end or delay becomes a RemoteError, the first of many."""
        self.check()
        try:
            yield
        except RuntimeError as error:
            text = str(error).strip().splitlines()
            self.broken = (
                f"a peer of rank {self.rank} failed, ended or was late, so that results of this call are undefined "
                f"({text[0] if text else type(error).__name__})"
            )
            raise RemoteError(self.broken) from error

    def check(self) -> None:
        if self.broken:
            raise RemoteError(f"this ContextParallel takes no more calls: {self.broken}")


def _packed(fields: Dict[str, Any], choices: Dict[str, List[str]], error: Optional[str]) -> torch.Tensor:
    content: Dict[str, Any] = {"fields": fields, "choices": choices, "error": error and error[:2000]}
    text = json.dumps(content).encode()
    if len(text) > HEADER_BYTES - 4:
        short = {name: hashlib.sha256(str(value).encode()).hexdigest()[:16] for name, value in fields.items()}
        text = json.dumps({**content, "fields": short}).encode()
    header = bytearray(HEADER_BYTES)
    header[:4] = len(text).to_bytes(4, "little")
    header[4 : 4 + len(text)] = text
    return torch.frombuffer(header, dtype=torch.uint8)


def _unpacked(header: torch.Tensor) -> Dict[str, Any]:
    raw = bytes(header.tolist())
    return json.loads(raw[4 : 4 + int.from_bytes(raw[:4], "little")])  # type: ignore[no-any-return]


def _named(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers} has" if len(ranks) == 1 else f"ranks {numbers} have"


def difference(headers: Sequence[Dict[str, Any]]) -> Optional[str]:
    """The first field in which ranks differ, as a sentence; None where there is none."""
    names: List[str] = []
    for header in headers:
        names += [name for name in header["fields"] if name not in names]
    for name in names:
        groups: Dict[str, List[int]] = {}
        for rank, header in enumerate(headers):
            groups.setdefault(str(header["fields"].get(name)), []).append(rank)
        if len(groups) > 1:
            said = [f"{_named(ranks)} {value}" for value, ranks in groups.items()]
            return f"ranks of a context-parallel call differ in {name}: {', '.join(said)}"
    return None


def wait_for(work: Any, timeout: Optional[datetime.timedelta]) -> None:
    """Of gloo; a CUDA stream waits by itself, and NCCL has a watchdog."""
    if timeout is None:
        work.wait()
    else:
        work.wait(timeout)


# Of each process group that moves nothing on the CPU, the group of gloo with the same ranks.
_beside: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _gloo_of(group: Any, ranks: List[int]) -> Any:
    if dist.get_backend(group) == "gloo":
        return group
    if group not in _beside:
        _beside[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _beside[group]


class Agreement:
    """Headers of all ranks of a group, by gloo where the group's own backend moves nothing on the CPU."""

    def __init__(self, group: Any, timeout: Optional[datetime.timedelta], health: Health) -> None:
        self.timeout, self.health = timeout, health
        group = dist.group.WORLD if group is None else group
        ranks = dist.get_process_group_ranks(group)
        with health.watch():
            self.group = _gloo_of(group, ranks)
        self.ranks = len(ranks)

    def _headers(self, mine: torch.Tensor) -> List[Dict[str, Any]]:
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        with self.health.watch():
            wait_for(dist.all_gather(every, mine, group=self.group, async_op=True), self.timeout)
        return [_unpacked(each) for each in every]

    def check(
        self,
        fields: Dict[str, Any],
        error: Optional[BaseException] = None,
        choices: Optional[Dict[str, List[str]]] = None,
    ) -> Dict[str, str]:
        """Collective. Of each choice the first that all ranks have; a ValueError on every rank where there is none,
        where fields differ, or where a rank met an error of its own."""
        said = None if error is None else f"{type(error).__name__}: {error}"
        headers = self._headers(_packed(fields, choices or {}, said))
        if error is not None:
            raise error
        for rank, header in enumerate(headers):
            if header["error"]:
                raise ValueError(
                    f"rank {rank} of a context-parallel call was given what it cannot take: {header['error']}"
                )
        sentence = difference(headers)
        if sentence:
            raise ValueError(sentence)
        return {name: _common([header["choices"][name] for header in headers], name) for name in choices or {}}


def _common(lists: Sequence[Sequence[str]], name: str) -> str:
    for choice in lists[0]:
        if all(choice in each for each in lists):
            return choice
    said = [f"rank {rank} has {' or '.join(each)}" for rank, each in enumerate(lists)]
    raise ValueError(f"ranks of a context-parallel call differ in where {name} lies: {', '.join(said)}")
