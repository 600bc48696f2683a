"""What the stand-ins do not take: one sentence each, in classes that are flash-attn's RuntimeError as well as ours."""

from __future__ import annotations

from typing import Any, NoReturn

from .._arguments import said


class InvalidArgument(ValueError, RuntimeError):
    """A ValueError of ours; callers of flash-attn catch RuntimeError."""


class WrongType(TypeError, RuntimeError):
    """A TypeError of ours; callers of flash-attn catch RuntimeError."""


Unsupported = NotImplementedError  # which is a RuntimeError


def again(error: Exception) -> Exception:
    """An error of our own functions as the class that callers of flash-attn catch."""
    if isinstance(error, RuntimeError):
        return error
    return (WrongType if isinstance(error, TypeError) else InvalidArgument)(*error.args)


def no_dropout(dropout_p: Any) -> NoReturn:
    raise Unsupported(
        f"dropout_p is {said(dropout_p)}, but flash_dmattn has no dropout yet: pass 0 (model.eval(), or "
        "attention_dropout=0)"
    )


def no_fp8(name: str) -> NoReturn:
    raise Unsupported(f"{name} is given, but flash_dmattn has no float8 tensors yet: pass float16 or bfloat16 and None")


def no_table(name: str) -> NoReturn:
    raise Unsupported(
        f"{name} is given, but flash_dmattn takes it in flash_attn_with_kvcache alone: pass packed k and v, and None"
    )


def no_score_function(name: str) -> NoReturn:
    raise Unsupported(
        f"{name} is given, but flash_dmattn takes no Python functions and no tables of blocks: say the mask as attn_mask "
        "or key_intervals of flash_dmattn.flash_dmattn_func, and scores as its attn_bias"
    )


def no_generator() -> NoReturn:
    raise InvalidArgument("gen is given, but the `generator` argument is no longer supported: pass None")
