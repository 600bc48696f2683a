"""python -m flash_dmattn.compat: run a program with flash-attn's names on our kernels, or write them as files."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import tempfile
from typing import List, Optional, Tuple

from . import install
from ._install import write

_EXAMPLES = """examples:
  python -m flash_dmattn.compat run train.py --epochs 3
  python -m flash_dmattn.compat run -m pytest tests
  python -m flash_dmattn.compat write stand-ins && PYTHONPATH=$PWD/stand-ins torchrun train.py
"""


def _versions(text: str) -> Tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of versions such as 2,3") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flash_dmattn.compat",
        description="flash-attn's names on flash_dmattn's kernels.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="install, then run a script, or -m MODULE; its processes have the names too")
    run.add_argument("--replace", action="store_true", help="stand before a flash-attn that is installed")
    run.add_argument("-m", dest="module", metavar="MODULE", help="run this module in place of a script")
    run.add_argument("rest", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the script and its arguments")
    written = commands.add_parser("write", help="write files for PYTHONPATH")
    written.add_argument("folder")
    for each in (run, written):
        each.add_argument("--versions", type=_versions, default=(2,), help="of flash-attn; default 2; some of 2,3,4")
    return parser


def _run(module: Optional[str], rest: List[str], versions: Tuple[int, ...], replace: bool) -> None:
    install(versions, replace)
    with tempfile.TemporaryDirectory(prefix="flash-dmattn-") as folder:
        # For processes that this one starts: those that multiprocessing spawns get sys.path, others the environment.
        write(folder, versions)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        sys.path.insert(0, folder)
        if module is not None:
            sys.argv = [module, *rest]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.argv = rest
            sys.path.insert(0, os.path.dirname(os.path.abspath(rest[0])))
            runpy.run_path(rest[0], run_name="__main__")


def main(arguments: Optional[List[str]] = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.command == "write":
            write(options.folder, options.versions)
            return 0
        if options.module is None and not options.rest:
            parser.error("run needs a script, or -m MODULE")
        if options.module is None and not os.path.exists(options.rest[0]):
            parser.error(f"{options.rest[0]} does not exist")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    _run(options.module, options.rest, options.versions, options.replace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
