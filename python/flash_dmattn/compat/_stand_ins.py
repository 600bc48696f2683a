"""Which module of ours stands for which name, and under which distribution it is asked for."""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType
from typing import Dict, Iterable, NamedTuple, Tuple

_HERE = __package__
# By flash-attn's version. A name that others begin with is a package.
_MODULES: Dict[int, Dict[str, str]] = {
    2: {
        "flash_attn": ".flash_attn",
        "flash_attn.bert_padding": ".flash_attn.bert_padding",
        "flash_attn.flash_attn_interface": ".flash_attn.functions",
        "flash_attn.layers": ".flash_attn.layers",
        "flash_attn.layers.rotary": ".flash_attn.layers.rotary",
    },
    3: {
        "flash_attn_interface": ".flash_attn_interface",
        "flash_attn_3": ".flash_attn_interface",
        "flash_attn_3.flash_attn_interface": ".flash_attn_interface",
    },
    4: {
        "flash_attn": ".flash_attn",
        "flash_attn.flash_attn_interface": ".flash_attn.functions",
        "flash_attn.cute": ".flash_attn_cute",
        "flash_attn.cute.interface": ".flash_attn_cute",
    },
}


class Distribution(NamedTuple):
    """What package metadata say."""

    name: str
    version: str
    top_level: Tuple[str, ...]

    def texts(self) -> Dict[str, str]:
        """The files of a dist-info folder."""
        metadata = (
            f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.version}\n"
            "Summary: flash_dmattn under flash-attn's names\n"
        )
        return {"METADATA": metadata, "top_level.txt": "\n".join(self.top_level) + "\n", "INSTALLER": "flash_dmattn\n"}


_DISTRIBUTIONS = {
    2: Distribution("flash-attn", "2.8.3", ("flash_attn",)),
    3: Distribution("flash-attn-3", "3.0.0", ("flash_attn_interface", "flash_attn_3")),
    4: Distribution("flash-attn-4", "4.0.0", ("flash_attn",)),
}


def checked(versions: Iterable[int]) -> Tuple[int, ...]:
    """Versions in rising order, each once, or a sentence."""
    given = tuple(versions)
    if not given or any(version not in _MODULES for version in given):
        raise ValueError(f"versions is {given}; it must be some of 2, 3 and 4")
    return tuple(sorted(set(given)))


def modules(versions: Iterable[int]) -> Dict[str, str]:
    """Our module's full name by flash-attn's."""
    return {name: f"{_HERE}{target}" for version in versions for name, target in _MODULES[version].items()}


def distributions(versions: Iterable[int]) -> Tuple[Distribution, ...]:
    return tuple(_DISTRIBUTIONS[version] for version in versions)


def normalized(name: str) -> str:
    """A distribution's name as packaging compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(name: str) -> str:
    return f"{name} is not part of flash_dmattn's stand-in: install flash-attn for it"


def fill(module: ModuleType, target: str) -> None:
    """Gives `module` all that the module `target` of ours has; functions stay the same objects."""
    own = {"__name__", "__spec__", "__loader__", "__package__", "__path__", "__file__", "__cached__", "__builtins__"}
    source = importlib.import_module(target)
    for name, value in vars(source).items():
        # Submodules come by an import of their own.
        if name not in own and not isinstance(value, ModuleType):
            setattr(module, name, value)
    if module.__name__ == "flash_attn":  # which imports this one, so that programs find it as an attribute
        importlib.import_module("flash_attn.flash_attn_interface")


def fill_by_name(name: str) -> None:
    """fill() of the module that a written file is, from the file itself."""
    fill(sys.modules[name], modules((2, 3, 4))[name])
