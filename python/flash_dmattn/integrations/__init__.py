"""Integrations with other libraries; each is imported by name and needs that library."""

import warnings

# What vLLM and SGLang call from the package's entry points, in each of their processes, perhaps more than once.


def register_vllm() -> None:
    """Makes `--attention-backend CUSTOM` of vLLM flash_dmattn's; another package's backend of that name is left there.

    Raises:
        ImportError: vLLM is not installed, or too old.

    Examples:
        >>> from flash_dmattn.integrations import register_vllm
        >>> register_vllm()  # doctest: +SKIP
    """
    from vllm.v1.attention.backends import registry  # pyright: ignore[reportMissingImports]

    custom, path = registry.AttentionBackendEnum.CUSTOM, "flash_dmattn.integrations.vllm.Backend"
    if custom.is_overridden() and custom.get_path() != path:
        warnings.warn(
            f"vLLM's attention backend CUSTOM is {custom.get_path()} already, so flash_dmattn cannot be chosen: "
            "name the plug-in that is wanted in VLLM_PLUGINS",
            stacklevel=2,
        )
        return
    registry.register_backend(custom, path)


def register_sglang() -> None:
    """Makes `--attention-backend dmattn` of SGLang flash_dmattn's.

    Raises:
        ImportError: SGLang is not installed, or too old.

    Examples:
        >>> from flash_dmattn.integrations import register_sglang
        >>> register_sglang()  # doctest: +SKIP
    """
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES  # pyright: ignore[reportMissingImports]
    from sglang.srt.layers.attention import attention_registry  # pyright: ignore[reportMissingImports]

    def create(runner: object) -> object:
        from .sglang import Backend

        return Backend(runner)

    attention_registry.register_attention_backend("dmattn")(create)
    if "dmattn" not in ATTENTION_BACKEND_CHOICES:
        ATTENTION_BACKEND_CHOICES.append("dmattn")
