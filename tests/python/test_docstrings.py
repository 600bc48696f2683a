"""test_docstrings.py: every public name says its parameters, results and errors, and its example runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "scripts"))
import api_page

MODULES = [".".join(["flash_dmattn", name]).strip(".") for name in api_page.MODULES]


def public():
    """(qualified name, object) of each name of __all__, and of the public methods of classes that have a docstring."""
    for module in MODULES:
        loaded = importlib.import_module(module)
        for name in loaded.__all__:
            thing = getattr(loaded, name)
            if inspect.ismodule(thing):
                continue
            yield f"{module}.{name}", thing
            for method, each in vars(thing).items() if inspect.isclass(thing) else ():
                each = getattr(each, "__func__", each)
                if inspect.isfunction(each) and not method.startswith("_") and each.__doc__:
                    yield f"{module}.{name}.{method}", each


PUBLIC = dict(public())


def parameters(thing):
    """Of a function, or of what makes an object of a class."""
    own = vars(thing) if inspect.isclass(thing) else {}
    made = own.get("__new__") or own.get("__init__") or thing
    names = list(inspect.signature(getattr(made, "__func__", made)).parameters)
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


@pytest.mark.parametrize("name", PUBLIC)
def test_docstring_is_complete(name):
    thing = PUBLIC[name]
    found = api_page.parsed(inspect.getdoc(thing))
    assert list(found.parts) == [part for part in api_page.PARTS if part in found.parts], "parts are out of order"
    assert {"Raises", "Examples"} <= set(found.parts)
    assert ("Returns" in found.parts) == (not inspect.isclass(thing))
    documented = [each for names, _ in found.items("Args") for each in names]
    assert len(documented) == len(set(documented))
    assert set(documented) == set(parameters(thing))
    assert all(text.strip() for part in ("Args", "Raises") for _, text in found.items(part))


@pytest.mark.parametrize("name", PUBLIC)
def test_example_runs(name, capsys):
    text = api_page.parsed(inspect.getdoc(PUBLIC[name])).parts["Examples"]
    if 'device="cuda"' in text and not torch.cuda.is_available():
        pytest.skip("the example needs a CUDA device")
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    assert example.examples
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert result.failed == 0, capsys.readouterr().out
