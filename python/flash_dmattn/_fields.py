"""The tensors and settings of attention, as native_fields.h lists them: positions and schemas follow from that list."""

from __future__ import annotations

import itertools
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from . import _native


class Field(NamedTuple):
    """A tensor. needed: by every call that reads it. gradient: its name, None where there is no gradient."""

    name: str
    argument: str
    axes: str
    needed: bool
    gradient: Optional[str]


_inputs, _results, _settings = _native.attention_fields()
INPUTS, RESULTS = tuple(map(Field._make, _inputs)), tuple(map(Field._make, _results))
# All that fdm_tensors holds, in the order of every call: inputs, results, the gradients of results and of inputs.
TENSORS = (
    *(field.name for field in INPUTS + RESULTS),
    *(field.gradient for field in RESULTS + INPUTS if field.gradient),
)
POSITION = {name: position for position, name in enumerate(TENSORS)}
SETTING = {name: position for position, (name, _) in enumerate(_settings)}
SOURCES = tuple(position for position, field in enumerate(INPUTS) if field.gradient)
# A float among the settings would be a part of compiled code. The settings that the code may compute, the tensors that
# bring them, and what then stands among the settings.
TRACED = (("softmax_scale", "traced_scale", None), ("softcap", "traced_softcap", 0.0))


# ---- operators -------------------------------------------------------------------------------------------------------

Group = List[Tuple[str, Optional[str]]]


class Signature:
    """The arguments of an operator in groups. A group lists declarations, each with its axes, None for a number."""

    def __init__(self, *groups: Group) -> None:
        declared = list(itertools.chain(*groups))
        ends = list(itertools.accumulate(map(len, groups)))
        self.schema = ", ".join(text for text, _ in declared)
        self.axes = [axes for _, axes in declared]
        self.slices = [slice(end - len(group), end) for end, group in zip(ends, groups)]

    def split(self, arguments: Sequence[Any]) -> List[Tuple[Any, ...]]:
        """The arguments of each group. PyTorch leaves out defaults at the end, which are None."""
        whole = (*arguments, *[None] * (len(self.axes) - len(arguments)))
        return [whole[each] for each in self.slices]


def _declared(fields: Sequence[Field], needed: bool, default: str = "") -> Group:
    kind = "Tensor" if needed else "Tensor?"
    return [(f"{kind} {field.name}{default}", field.axes) for field in fields if field.needed is needed]


_given: Group = [each for field in INPUTS for each in _declared([field], field.needed)]
_known, _perhaps_known = _declared(RESULTS, True), _declared(RESULTS, False, "=None")
_flowing: Group = [(f"Tensor? {field.gradient}", field.axes) for field in RESULTS if field.gradient]
_needs: Group = [(f"bool needs_{INPUTS[source].gradient}", None) for source in SOURCES]
_numbers: Group = [(f"{kind} {name}", None) for name, kind in _settings]
_traced: Group = [(f"Tensor? {name}=None", None) for _, name, _ in TRACED]

NUMBERS = _numbers
FORWARD = Signature(_given, _numbers, _traced)
BACKWARD = Signature(_given, _known, _flowing, _needs, _numbers, _perhaps_known, _traced)
SAVED = Signature(_given, _known, _perhaps_known, _traced)  # what the backward keeps of the forward
