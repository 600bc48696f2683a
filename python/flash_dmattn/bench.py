"""Runs the benchmark of a checkout with this package: `python -m flash_dmattn.bench [--root FOLDER] ...`.

The programs lie in the checkout's folder bench/; --root names the checkout, by default the current folder. The other
arguments are theirs, and --help prints them.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
from typing import List, Optional

__all__ = ["main"]


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs the benchmark of a checkout; the programs lie in its folder bench/.

    Args:
        arguments: of the command line; default None: those of the process. --root names the checkout, by default the
            current folder. The others are the benchmark's, and --help prints them.

    Returns:
        The benchmark's exit code; 2, with a sentence on stderr, where no benchmark is found.

    Raises:
        SystemExit: --help was asked for, or an argument is wrong.

    Examples:
        >>> from flash_dmattn import bench
        >>> bench.main(["--root", "no/such/folder"])
        2
    """
    parser = argparse.ArgumentParser(prog="python -m flash_dmattn.bench", add_help=False, allow_abbrev=False)
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path())
    options, rest = parser.parse_known_args(arguments)
    folder = options.root.resolve() / "bench"
    if not (folder / "bench_attention.py").is_file():
        print(
            f"python -m flash_dmattn.bench: {folder} holds no benchmark; run it in a checkout of flash-dmattn, or name "
            "one by --root",
            file=sys.stderr,
        )
        return 2
    sys.path.insert(0, str(folder))
    return int(importlib.import_module("bench_attention").main(rest))


if __name__ == "__main__":
    sys.exit(main())
