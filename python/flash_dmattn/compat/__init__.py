"""flash-attn's names on our kernels: for code that says `import flash_attn` and is not to be changed.

    from flash_dmattn import compat
    compat.install()                 # from here on `import flash_attn` gives compat.flash_attn

or, without a line in the program, `python -m flash_dmattn.compat run SCRIPT ...`. The modules stand by themselves too:
compat.flash_attn (version 2), compat.flash_attn_interface (version 3) and compat.flash_attn_cute (version 4) have the
names, parameters, order and defaults of those packages. They need PyTorch; install() does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._install import install, uninstall

if TYPE_CHECKING:  # what __getattr__ imports
    from . import flash_attn, flash_attn_cute, flash_attn_interface

__all__ = ["flash_attn", "flash_attn_cute", "flash_attn_interface", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    if name not in ("flash_attn", "flash_attn_cute", "flash_attn_interface"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)
