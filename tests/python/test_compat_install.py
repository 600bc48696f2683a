"""test_compat_install.py: install(): imports, package metadata, other libraries that ask for flash-attn, and a way back."""

import importlib
import importlib.metadata
import importlib.util
import os
import pickle
import subprocess
import sys
import textwrap

import flash_dmattn
import pytest
from flash_dmattn import compat

SITE = os.path.dirname(os.path.dirname(flash_dmattn.__file__))


@pytest.fixture
def installed():
    compat.install()
    yield
    compat.uninstall()


@pytest.fixture(autouse=True)
def way_back():
    before = list(sys.meta_path), {name for name in sys.modules if name.startswith("flash_attn")}
    yield
    compat.uninstall()
    assert (list(sys.meta_path), {name for name in sys.modules if name.startswith("flash_attn")}) == before


def run(script, *arguments, **environment):
    """The output of a script in another process."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run(
        [sys.executable, *arguments, *([] if script is None else ["-c", textwrap.dedent(script)])],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- imports and metadata --------------------------------------------------------------------------------------------


def test_imports(installed):
    module = importlib.import_module("flash_attn")
    assert module.flash_attn_func is compat.flash_attn.flash_attn_func
    assert module.flash_attn_interface is sys.modules["flash_attn.flash_attn_interface"]
    assert module.flash_attn_interface.__name__ == "flash_attn.flash_attn_interface"
    assert (module.__name__, module.__version__, module.__provider__) == ("flash_attn", "2.8.3", "flash_dmattn")
    from flash_attn.bert_padding import pad_input
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward
    from flash_attn.layers.rotary import apply_rotary_emb

    assert pad_input is compat.flash_attn.bert_padding.pad_input
    assert _wrapped_flash_attn_forward is compat.flash_attn.flash_attn_interface._flash_attn_forward
    assert apply_rotary_emb.__module__ == "flash_dmattn.compat.flash_attn.layers.rotary"
    assert module.bert_padding is sys.modules["flash_attn.bert_padding"]


def test_spec_before_and_after_the_import(installed):
    for _ in range(2):
        spec = importlib.util.find_spec("flash_attn")
        assert spec.name == "flash_attn" and spec.submodule_search_locations == []
        assert importlib.util.find_spec("flash_attn.bert_padding").name == "flash_attn.bert_padding"
        importlib.import_module("flash_attn")
        assert sys.modules["flash_attn"].__spec__ is not None
    assert importlib.util.find_spec("flash_attn_interface") is None


@pytest.mark.parametrize(
    ("versions", "distributions"),
    [
        ((2,), {"flash-attn": "2.8.3"}),
        ((2, 3), {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0"}),
        ((4,), {"flash-attn-4": "4.0.0"}),
    ],
)
def test_metadata(versions, distributions):
    compat.install(versions)
    for name, version in distributions.items():
        for spelled in (name, name.replace("-", "_"), name.upper()):
            assert importlib.metadata.version(spelled) == version
        assert importlib.metadata.metadata(name)["Name"] == name
    packages = importlib.metadata.packages_distributions()
    assert set(packages.get("flash_attn", ())) == {name for name in distributions if name != "flash-attn-3"}
    assert packages.get("flash_attn_interface", []) == (["flash-attn-3"] if 3 in versions else [])
    assert importlib.metadata.version("torch") and "torch" in packages
    compat.uninstall()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")


def test_other_versions():
    compat.install((2, 3, 4))
    from flash_attn.cute import flash_attn_func as four
    from flash_attn.cute.interface import flash_attn_combine
    from flash_attn_3.flash_attn_interface import flash_attn_func as again
    from flash_attn_interface import flash_attn_func as three

    assert three is again is compat.flash_attn_interface.flash_attn_func
    assert four is compat.flash_attn_cute.flash_attn_func
    assert flash_attn_combine is compat.flash_attn_cute.flash_attn_combine


def test_what_is_not_there(installed):
    for name in ("flash_attn.ops.triton.layer_norm", "flash_attn.modules"):
        with pytest.raises(ImportError, match=r"is not part of flash_dmattn's stand-in: install flash-attn for it"):
            importlib.import_module(name)
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn_2_cuda")


@pytest.mark.parametrize("versions", [(), (1,), (2, 5)])
def test_versions_that_are_none(versions):
    with pytest.raises(ValueError, match="it must be some of 2, 3 and 4"):
        compat.install(versions)


# ---- more than once, and back ----------------------------------------------------------------------------------------


def test_a_second_install():
    compat.install()
    once = list(sys.meta_path)
    module = importlib.import_module("flash_attn")
    compat.install((2,))
    compat.install([2, 2])
    assert sys.meta_path == once and sys.modules["flash_attn"] is module
    compat.install((2, 3))
    assert len(sys.meta_path) == len(once)
    assert importlib.import_module("flash_attn_interface").flash_attn_combine


def test_uninstall_twice_and_functions_that_were_imported():
    compat.uninstall()
    compat.install()
    function = importlib.import_module("flash_attn").flash_attn_func
    compat.uninstall()
    compat.uninstall()
    import torch

    assert function(*torch.zeros(3, 1, 2, 1, 8)).shape == (1, 2, 1, 8)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn")


def test_pickles(installed):
    """Functions are pickled under our own names, so that whoever reads them needs no install()."""
    from flash_attn import flash_attn_func

    text = pickle.dumps(flash_attn_func)
    compat.uninstall()
    assert pickle.loads(text) is flash_attn_func
    assert b"flash_dmattn.compat" in text


@pytest.fixture
def real(tmp_path, monkeypatch):
    """A folder with another flash_attn, first in sys.path."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '2.7.4'\n")
    info = tmp_path / "flash_attn-2.7.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.7.4\n")
    (info / "top_level.txt").write_text("flash_attn\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("flash_attn", None)


@pytest.mark.parametrize("loaded", [False, True])
def test_beside_the_real_package(real, loaded):
    theirs = importlib.import_module("flash_attn") if loaded else None
    with pytest.raises(RuntimeError, match=r"flash_attn 2.7.4 is installed; pass replace=True to put flash_dmattn"):
        compat.install()
    assert importlib.metadata.version("flash-attn") == "2.7.4"
    compat.install(replace=True)
    assert importlib.import_module("flash_attn").__version__ == importlib.metadata.version("flash-attn") == "2.8.3"
    compat.uninstall()
    again = importlib.import_module("flash_attn")
    assert again.__version__ == importlib.metadata.version("flash-attn") == "2.7.4"
    assert theirs is None or again is theirs
    del sys.modules["flash_attn"]


# ---- other processes -------------------------------------------------------------------------------------------------


def test_install_needs_no_torch():
    out = run("""
        import sys
        from flash_dmattn import compat
        compat.install()
        import importlib.util
        importlib.util.find_spec("flash_attn")
        print("torch" in sys.modules)
    """)  # fmt: skip
    assert out == "False\n"


def test_import_of_the_package_brings_nothing_of_this():
    assert run("import sys, flash_dmattn; print([name for name in sys.modules if 'compat' in name])") == "[]\n"


CHILD = """
    import multiprocessing, sys

    def ask(queue):
        import importlib.metadata
        import flash_attn
        queue.put((flash_attn.__provider__, importlib.metadata.version("flash_attn")))

    if __name__ == "__main__":
        import flash_attn
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        child = context.Process(target=ask, args=(queue,))
        child.start()
        print(*queue.get(timeout=100), *sys.argv[1:])
        child.join()
"""


@pytest.mark.rotates(2)
def test_run_and_a_spawned_child(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(CHILD))
    out = run(None, "-m", "flash_dmattn.compat", "run", str(script), "--flag", "1")
    assert out == "flash_dmattn 2.8.3 --flag 1\n"
    out = run(None, "-m", "flash_dmattn.compat", "run", "--versions", "2,3", "-m", "program", "x", PYTHONPATH=str(tmp_path))
    assert out == "flash_dmattn 2.8.3 x\n"


@pytest.mark.rotates(2)
def test_written_files_and_a_spawned_child(tmp_path):
    folder, script = tmp_path / "names", tmp_path / "program.py"
    script.write_text(textwrap.dedent(CHILD))
    run(None, "-m", "flash_dmattn.compat", "write", "--versions", "2,3,4", str(folder))
    assert run(None, str(script), PYTHONPATH=str(folder)) == "flash_dmattn 2.8.3\n"
    out = run(
        """
        import importlib.metadata
        from flash_attn import flash_attn_func
        from flash_attn.cute.interface import flash_attn_func as four
        from flash_attn.layers.rotary import apply_rotary_emb
        from flash_attn_interface import flash_attn_func as three
        from flash_dmattn import compat
        print(flash_attn_func is compat.flash_attn.flash_attn_func, three is compat.flash_attn_interface.flash_attn_func,
              four is compat.flash_attn_cute.flash_attn_func)
        packages = importlib.metadata.packages_distributions()
        print(sorted(packages["flash_attn"]), packages["flash_attn_interface"])
        print(importlib.metadata.version("flash-attn-3"), len(importlib.metadata.files("flash-attn")) > 5)
        """,
        PYTHONPATH=str(folder),
    )  # fmt: skip
    assert run("from flash_dmattn import compat; compat.install(); import flash_attn", PYTHONPATH=str(folder)) == ""
    assert out == "True True True\n['flash-attn', 'flash-attn-4'] ['flash-attn-3']\n3.0.0 True\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "nowhere.py"), "nowhere.py does not exist"),
        (("run",), "run needs a script, or -m MODULE"),
        (("run", "--versions", "x", "y.py"), "'x' is not a list of versions such as 2,3"),
        (("write", "--versions", "7", "z"), r"versions is \(7,\); it must be some of 2, 3 and 4"),
    ],
)
def test_wrong_command_lines(arguments, sentence, capsys):
    from flash_dmattn.compat.__main__ import main

    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2
    import re

    assert re.search(sentence, capsys.readouterr().err)


def test_write_does_not_overwrite(tmp_path):
    from flash_dmattn.compat.__main__ import main

    assert main(["write", str(tmp_path)]) == 0
    with pytest.raises(SystemExit):
        main(["write", str(tmp_path)])


# ---- other libraries -------------------------------------------------------------------------------------------------


def test_diffusers_way_of_asking():
    """Spec and version at import, then two private names, or it falls back with a warning."""
    out = run("""
        from flash_dmattn import compat
        compat.install()
        import importlib.metadata, importlib.util
        from packaging.version import parse
        assert importlib.util.find_spec("flash_attn") is not None
        assert parse(importlib.metadata.version("flash_attn")) >= parse("2.6.3")
        from flash_attn import flash_attn_func, flash_attn_varlen_func
        from flash_attn.flash_attn_interface import _wrapped_flash_attn_backward, _wrapped_flash_attn_forward
        import torch
        q = torch.randn(1, 5, 2, 8)
        out, lse, nothing, state = _wrapped_flash_attn_forward(
            q, q, q, 0.0, 8**-0.5, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
            alibi_slopes=None, return_softmax=False)
        dq, dk, dv = (torch.empty_like(q) for _ in range(3))
        _wrapped_flash_attn_backward(q, q, q, q, out, lse, dq, dk, dv, 0.0, 8**-0.5, False, -1, -1, 0.0, None, False,
                                     rng_state=state)
        print(lse.shape, torch.isfinite(dq).all().item())
    """)  # fmt: skip
    assert out == "torch.Size([1, 2, 5]) True\n"


def test_xformers_way_of_asking():
    """A name that it reads without a guard, and a range of versions without a local part."""
    out = run("""
        from flash_dmattn import compat
        compat.install()
        import importlib.util
        assert importlib.util.find_spec("flash_attn")
        import flash_attn
        from flash_attn.flash_attn_interface import flash_attn_gpu as extension
        numbers = tuple(int(part) for part in flash_attn.__version__.split("."))
        assert (2, 7, 1) <= numbers <= (2, 8, 4)
        import torch
        q = torch.randn(6, 2, 8, dtype=torch.bfloat16)
        offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
        out, lse, nothing, state = extension.varlen_fwd(
            q, q, q, None, offsets, offsets, None, None, None, None, 4, 4, 0.0, 8**-0.5, False, True, -1, -1, 0.0, False,
            None)
        print(out.shape, lse.shape)
    """)  # fmt: skip
    assert out == "torch.Size([6, 2, 8]) torch.Size([2, 6])\n"


def test_warning_where_another_library_has_decided(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", sys)
    with pytest.warns(UserWarning, match="diffusers.models.attention_dispatch was imported before"):
        compat.install()
