"""install() and uninstall(): a finder in memory that answers imports and questions about installed packages."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from importlib import metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from . import _stand_ins

# Modules that ask once, at their import, whether flash-attn is there.
_DECIDED = ("diffusers.models.attention_dispatch", "xformers.ops.fmha.flash")


class _Loader(Loader):
    def __init__(self, target: str) -> None:
        self.target = target

    def exec_module(self, module: ModuleType) -> None:
        _stand_ins.fill(module, self.target)


class _Metadata(metadata.Distribution):
    def __init__(self, distribution: _stand_ins.Distribution) -> None:
        self._texts = distribution.texts()

    def read_text(self, filename: str) -> Optional[str]:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: flash_dmattn's stand-in has no files")


class _Finder(metadata.DistributionFinder):
    """One stand-in, of one or several versions."""

    def __init__(self, versions: Tuple[int, ...]) -> None:
        self.versions = versions
        self.modules = _stand_ins.modules(versions)
        self.roots = {name.partition(".")[0] for name in self.modules}
        self.distributions = _stand_ins.distributions(versions)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        if fullname in self.modules:
            is_package = any(name.startswith(f"{fullname}.") for name in self.modules)
            origin = f"flash_dmattn ({self.modules[fullname]})"
            return ModuleSpec(fullname, _Loader(self.modules[fullname]), origin=origin, is_package=is_package)
        if fullname.partition(".")[0] in self.roots:
            raise ModuleNotFoundError(_stand_ins.missing(fullname), name=fullname)
        return None

    def find_distributions(self, context: Any = metadata.DistributionFinder.Context()) -> Iterator[Any]:
        for distribution in self.distributions:
            if context.name is None or _stand_ins.normalized(context.name) == distribution.name:
                yield _Metadata(distribution)


class _Installed:
    """The finder that is in place, and what it took the place of."""

    finder: Optional[_Finder] = None
    modules: Dict[str, ModuleType] = {}
    transformers: List[Tuple[Dict[str, Any], str, Any]] = []


def install(versions: Iterable[int] = (2,), replace: bool = False) -> None:
    """Makes `import flash_attn`, and questions about the installed package, give flash_dmattn's stand-in.

    Call it before transformers, diffusers, xformers and whatever else asks for flash-attn at its import. Processes that
    this one spawns do not inherit it: `python -m flash_dmattn.compat write FOLDER` with FOLDER in PYTHONPATH is for
    them. A second call changes nothing, or the versions.

    Args:
        versions: of flash-attn, some of 2 (`flash_attn`), 3 (`flash_attn_interface`) and 4 (`flash_attn.cute`).
            Default (2,).
        replace: whether to stand before a flash-attn that is installed. Default False.

    Returns:
        Nothing.

    Raises:
        ValueError: versions are none of these.
        RuntimeError: flash-attn is installed, and replace is False.

    Examples:
        >>> import importlib.metadata
        >>> from flash_dmattn import compat
        >>> compat.install()
        >>> importlib.metadata.version("flash_attn")
        '2.8.3'
        >>> compat.uninstall()
    """
    finder = _Finder(_stand_ins.checked(versions))
    old = _Installed.finder
    if old is not None and old.versions == finder.versions and old in sys.meta_path:
        return
    uninstall()
    if not replace:
        _refuse_beside(finder)
    for name in [name for name in sys.modules if name.partition(".")[0] in finder.roots]:
        _Installed.modules[name] = sys.modules.pop(name)
    sys.meta_path.insert(0, finder)
    _Installed.finder = finder
    importlib.invalidate_caches()
    _tell_transformers(finder)
    for name in _DECIDED:
        if name in sys.modules:
            warnings.warn(
                f"{name} was imported before flash_dmattn.compat.install() and has decided already: install first",
                stacklevel=2,
            )


def uninstall() -> None:
    """Takes back what install() did; modules that were in its place come back.

    Functions that a program has imported keep working.

    Returns:
        Nothing.

    Raises:
        Nothing: without install() there is nothing to take back.

    Examples:
        >>> from flash_dmattn import compat
        >>> compat.install()
        >>> import flash_attn
        >>> compat.uninstall()
        >>> flash_attn.__provider__
        'flash_dmattn'
    """
    finder = _Installed.finder
    if finder is None:
        return
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
    for name in [name for name, module in sys.modules.items() if _is_ours(module)]:
        del sys.modules[name]
    sys.modules.update(_Installed.modules)
    _Installed.finder, _Installed.modules = None, {}
    importlib.invalidate_caches()
    for mapping, name, before in reversed(_Installed.transformers):
        if before is None:
            mapping.pop(name, None)
        else:
            mapping[name] = before
    _Installed.transformers = []
    _forget_in_transformers()


def _is_ours(module: Any) -> bool:
    return isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _Loader)


def _refuse_beside(finder: _Finder) -> None:
    """A sentence where flash-attn itself is installed, or loaded."""
    for root in sorted(finder.roots):
        if root not in sys.modules and importlib.util.find_spec(root) is None:
            continue
        name = next(each.name for each in finder.distributions if root in each.top_level)
        try:
            found = metadata.distribution(name)
            if (found.read_text("INSTALLER") or "").strip() == "flash_dmattn":
                continue  # files of write()
            version = f" {found.version}"
        except metadata.PackageNotFoundError:
            version = ""
        raise RuntimeError(f"{root}{version} is installed; pass replace=True to put flash_dmattn before it")


# ---- transformers, where it was imported before ----------------------------------------------------------------------


def _forget_in_transformers() -> None:
    """Clears what transformers remembers of flash-attn."""
    for module in _of_transformers():
        for name, value in vars(module).items():
            if ("flash_attn" in name or name == "_package_distribution_mapping") and hasattr(value, "cache_clear"):
                value.cache_clear()


def _of_transformers() -> List[Any]:
    known = (sys.modules.get(name) for name in ("transformers.utils.import_utils",))
    return [module for module in known if module is not None]


def _tell_transformers(finder: _Finder) -> None:
    """Some versions keep a map of packages, made at their import."""
    for module in _of_transformers():
        mapping = getattr(module, "PACKAGE_DISTRIBUTION_MAPPING", None)
        if not isinstance(mapping, dict):
            continue
        for root in finder.roots:
            names = [each.name for each in finder.distributions if root in each.top_level]
            before = mapping.get(root)
            _Installed.transformers.append((mapping, root, before))
            mapping[root] = [*names, *(each for each in before or () if each not in names)]
    _forget_in_transformers()
    loaded = getattr(sys.modules.get("transformers.modeling_flash_attention_utils"), "_loaded_implementation", None)
    if loaded is not None:
        warnings.warn(
            f"transformers has loaded {loaded} before flash_dmattn.compat.install() and keeps it: install first",
            stacklevel=3,
        )


# ---- files -----------------------------------------------------------------------------------------------------------


def write(folder: str, versions: Sequence[int] = (2,)) -> None:
    """Writes the stand-in as files into `folder`, which must not have any of them: for PYTHONPATH."""
    versions = _stand_ins.checked(versions)
    names = _stand_ins.modules(versions)
    files = {}
    for name in names:
        is_package = any(other.startswith(f"{name}.") for other in names)
        path = os.path.join(*name.split("."), "__init__.py") if is_package else os.path.join(*name.split(".")) + ".py"
        files[path] = (
            f'"""{name}, as `python -m flash_dmattn.compat write` has written it: flash_dmattn stands here."""\n\n'
            "from flash_dmattn.compat._stand_ins import fill_by_name\n\n"
            "fill_by_name(__name__)\n"
        )
    for distribution in _stand_ins.distributions(versions):
        info = f"{distribution.name.replace('-', '_')}-{distribution.version}.dist-info"
        files.update({os.path.join(info, name): text for name, text in distribution.texts().items()})
        listed = [path for path in files if path.split(os.sep)[0].removesuffix(".py") in (*distribution.top_level, info)]
        record = os.path.join(info, "RECORD")
        files[record] = "".join(f"{path.replace(os.sep, '/')},,\n" for path in (*listed, record))
    for path, text in files.items():
        whole = os.path.join(folder, path)
        os.makedirs(os.path.dirname(whole), exist_ok=True)
        with open(whole, "x", encoding="utf-8") as file:
            file.write(text)
