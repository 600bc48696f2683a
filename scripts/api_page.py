#!/usr/bin/env python3
"""api_page.py: writes docs/api-python.md from the package's docstrings and docs/api-c.md from the header's comments.
Usage: api_page.py [--check]

Nothing is imported: the Python page comes from the sources' syntax trees. The names of a module's __all__ are its entries,
and so are the public methods of its classes that have a docstring. A docstring is a summary, text, and the parts of PARTS;
an item of a part begins with its names. In the header a comment at the left margin is the text of what follows it.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python/flash_dmattn"
MODULES = ("", "masks", "context_parallel", "jax", "integrations.transformers", "integrations.doge", "compat", "compat.varlen", "bench")
HEADER = ROOT / "include/flash_dmattn.h"
PARTS = ("Args", "Returns", "Raises", "Examples")
WIDTH = 120

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


# ---- Markdown --------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Prose as Markdown: what is not in backquotes loses its meaning there."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(each if each.startswith("`") else re.sub(r"([*<]|\b__|__\b)", r"\\\1", each) for each in parts)


def filled(text: str, first: str = "", indent: str = "") -> str:
    """One paragraph. A line that would begin as a list or a heading does not."""
    text = escaped(" ".join(text.split()))
    lines = textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False,
                          break_on_hyphens=False)
    rest = (re.sub(r"^(\s*)([-+>#=]|\d+[.)])", r"\1\\\2", line) for line in lines[1:])
    return "\n".join([*lines[:1], *rest])


def prose(text: str) -> str:
    """Paragraphs, lists and indented blocks of a comment or a docstring."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if block.startswith("    "):
            blocks.append(textwrap.indent(textwrap.dedent(block), "    "))
        else:
            items = (("- ", each[2:]) if each.startswith("- ") else ("", each) for each in re.split(r"\n(?=- )", block))
            blocks.append("\n".join(filled(text, mark, " " * len(mark)) for mark, text in items))
    return "\n\n".join(blocks)


def fenced(code: str, language: str) -> str:
    return f"```{language}\n{code}\n```"


# ---- docstrings ------------------------------------------------------------------------------------------------------


class Docstring(NamedTuple):
    """text: what stands before the parts. parts: by name; items: (names, text) of Args and Raises."""

    text: str
    parts: dict[str, str]

    def items(self, part: str) -> list[tuple[list[str], str]]:
        """Items begin at the margin; lines that go on are indented."""
        found = []
        for item in re.split(r"\n(?=\S)", self.parts.get(part, "")):
            names, colon, text = item.partition(":")
            if item and not colon:
                raise ValueError(f"an item of {part} has no colon: {item}")
            if item:
                found.append(([name.strip() for name in names.split(",")], text))
        return found


def parsed(docstring: str) -> Docstring:
    """Of a docstring without its indentation."""
    pieces = re.split(rf"^({'|'.join(PARTS)}):\n", docstring, flags=re.MULTILINE)
    parts = {name: textwrap.dedent(text).strip() for name, text in zip(pieces[1::2], pieces[2::2])}
    return Docstring(pieces[0].strip(), parts)


def python_entry(heading: str, signature: str, docstring: str) -> str:
    found = parsed(docstring)
    blocks = [heading, fenced(signature, "python"), prose(found.text)]
    for part in PARTS[:3]:
        if part == "Returns" and part in found.parts:
            blocks.append(filled(f"Returns: {found.parts[part]}"))
        elif part in found.parts:
            items = [filled(f"{', '.join(f'`{name}`' for name in names)}: {text}", "- ", "  ")
                     for names, text in found.items(part)]
            blocks.append(f"{part}:\n\n" + "\n".join(items).replace("- `Nothing`:", "- Nothing:"))
    if "Examples" in found.parts:
        blocks.append(fenced(found.parts["Examples"], "python"))
    return "\n\n".join(blocks)


# ---- Python ----------------------------------------------------------------------------------------------------------


class Module:
    """A source file of the package."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self.tree = path, ast.parse(path.read_text(encoding="utf-8"))

    def public(self) -> list[str]:
        """The names of __all__."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                return ast.literal_eval(node.value)
        raise ValueError(f"{self.path} has no __all__")

    def source_of(self, name: str) -> Module | None:
        """Where an imported name is defined; None: it is a module."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and any((each.asname or each.name) == name for each in node.names):
                return Module(self.path.parents[node.level - 1] / f"{node.module}.py") if node.module else None
        raise ValueError(f"{self.path} neither defines nor imports {name}")

    def definition(self, name: str) -> ast.AST | None:
        """The function or class; of overloads what runs, which comes last."""
        found = [node for node in self.tree.body if isinstance(node, (*Function, ast.ClassDef)) and node.name == name]
        return found[-1] if found else None

    def default(self, node: ast.expr) -> str:
        """A default as help() prints it: constants of the package by their value."""
        if isinstance(node, ast.Name):
            for each in self.tree.body:
                if isinstance(each, ast.Assign) and getattr(each.targets[0], "id", "") == node.id:
                    return ast.unparse(each.value)
            source = self.source_of(node.id)
            return source.default(node) if source else node.id
        return ast.unparse(node)

    def signature(self, name: str, function: ast.AST, skip: int, returns: bool = True) -> str:
        """The first `skip` parameters are not the caller's."""
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
        pieces = [self.parameter(*each) for each in list(zip(positional, defaults))[skip:]]
        if arguments.vararg:
            pieces.append(f"*{self.parameter(arguments.vararg, None)}")
        elif arguments.kwonlyargs:
            pieces.append("*")
        pieces += [self.parameter(*each) for each in zip(arguments.kwonlyargs, arguments.kw_defaults)]
        if arguments.kwarg:
            pieces.append(f"**{self.parameter(arguments.kwarg, None)}")
        end = f") -> {ast.unparse(function.returns)}" if returns and function.returns else ")"
        line = f"{name}({', '.join(pieces)}{end}"
        return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {each},\n" for each in pieces) + end

    def parameter(self, argument: ast.arg, default: ast.expr | None) -> str:
        text = argument.arg + (f": {ast.unparse(argument.annotation)}" if argument.annotation else "")
        if default is None:
            return text
        return f"{text}{' = ' if argument.annotation else '='}{self.default(default)}"

    def methods(self, node: ast.ClassDef) -> Iterator[tuple[str, ast.FunctionDef]]:
        for each in node.body:
            if isinstance(each, Function) and not each.name.startswith("_") and ast.get_docstring(each):
                yield each.name, each


def class_signature(module: Module, node: ast.ClassDef) -> str:
    made = {each.name: each for each in node.body if isinstance(each, Function)}
    maker = made.get("__new__") or made.get("__init__")
    return f"class {module.signature(node.name, maker, 1, False)}" if maker else f"class {node.name}"


def python_entries(module: Module, name: str, prefix: str) -> Iterator[str]:
    while module.definition(name) is None:
        source = module.source_of(name)
        if source is None:
            return  # a module, with a section of its own
        module = source
    node = module.definition(name)
    docstring = ast.get_docstring(node)
    if not docstring:
        raise ValueError(f"{module.path}: {name} has no docstring")
    if isinstance(node, ast.ClassDef):
        yield python_entry(f"### {prefix}{name}", class_signature(module, node), docstring)
        for method, each in module.methods(node):
            yield python_entry(f"#### {prefix}{name}.{method}", module.signature(method, each, 1), ast.get_docstring(each))
    else:
        yield python_entry(f"### {prefix}{name}", module.signature(name, node, 0), docstring)


def python_page() -> str:
    blocks = [
        "# Python reference",
        "<!-- written by scripts/api_page.py from the docstrings -->",
        prose("[python.md](python.md) shows how the parts go together. B sequences, H query heads, Hkv heads of keys and values, "
              "h any of 1, Hkv and H, Sq rows, Sk keys, D and Dv head dims; `x|1` is an axis of extent x or 1. What the "
              "exceptions mean is in [Errors](api.md#errors). `help()` prints the same texts, and the tests run the "
              "examples."),
    ]
    for name in MODULES:
        path = PACKAGE.joinpath(*name.split(".")) if name else PACKAGE
        module = Module(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
        blocks += [f"## {'.'.join(['flash_dmattn', *name.split('.')]).strip('.')}", prose(ast.get_docstring(module.tree))]
        for each in module.public():
            blocks += python_entries(module, each, f"{name.rpartition('.')[2]}." if name else "")
    return "\n\n".join(blocks) + "\n"


# ---- C ---------------------------------------------------------------------------------------------------------------

SECTION = re.compile(r"/\* ---- \d+\. (.*?) -+ \*/")
# What a declaration adds to the reader's names: functions, then types and enumerations.
NAMES = re.compile(r"(?:^FDM_API|^static inline)\s[^;{(]*?(\w+)\(|^\} (\w+);|^typedef struct (\w+) \w+;|^struct (\w+) \{",
                   re.MULTILINE)


def comment_text(lines: list[str]) -> str:
    text = "\n".join(lines)
    return re.sub(r"(?m)^ \* ?", "", re.sub(r"\s*\*/\s*$", "", re.sub(r"^/\* ?", "", text)).replace("\n *\n", "\n\n"))


def header_pieces(text: str) -> Iterator[tuple[str, str]]:
    """("section", title), ("comment", text) and ("code", text), in the header's order."""
    code: list[str] = []
    lines = iter(text.split("\n"))
    for line in lines:
        ends = line == "" or line.startswith("/*")
        if ends and "".join(code).strip() and not (line == "" and code_is_open(code)):
            yield "code", "\n".join(code).strip("\n")
            code = []
        if line.startswith("/*"):
            comment = [line]
            while "*/" not in comment[-1]:
                comment.append(next(lines))
            section = SECTION.fullmatch(line)
            yield ("section", section[1]) if section else ("comment", comment_text(comment))
        elif line:
            code.append(line)


def code_is_open(code: list[str]) -> bool:
    text = "\n".join(code)
    return text.count("{") != text.count("}")


def without_bodies(code: str) -> str:
    """Functions of the header as declarations, and all without what says that they are exported."""
    code = re.sub(r"(?ms)^(static inline [^{;]*?\)) \{\n.*?^\}", r"\1;", code)
    return re.sub(r"^FDM_API ", "", code, flags=re.MULTILINE)


def c_prose(text: str) -> str:
    """Names of the interface stand in backquotes, but in indented blocks."""
    blocks = re.split(r"(\n\s*\n)", text)
    return prose("".join(each if each.startswith("    ") else re.sub(r"\b(?:fdm|FDM)_\w+(?:\(\))?", r"`\g<0>`", each)
                         for each in blocks))


def c_page() -> str:
    text = HEADER.read_text(encoding="utf-8")
    first, _, rest = text.partition("#ifndef FLASH_DMATTN_H")
    manual = re.sub(r"^flash_dmattn\.h: .*\n\nSPDX.*\n", "", comment_text(first.strip().split("\n")))
    blocks = [
        "# C reference",
        "<!-- written by scripts/api_page.py from include/flash_dmattn.h -->",
        prose("[api.md](api.md) shows how the parts go together. The texts are the comments of `include/flash_dmattn.h`."),
        c_prose(manual),
    ]
    comment = ""
    for kind, piece in header_pieces(rest[rest.index("/* ---- 1.") : rest.rindex("#ifdef __cplusplus")]):
        if kind != "code" and comment:
            blocks.append(c_prose(comment))
            comment = ""
        if kind == "section":
            blocks.append(f"## {piece.partition(',')[0].partition(':')[0]}")
        elif kind == "comment":
            comment = piece
        else:
            names = [next(filter(None, each)) for each in NAMES.findall(piece)]
            if names:
                blocks.append(f"### {', '.join(names)}")
            if comment:
                blocks.append(c_prose(comment))
                comment = ""
            blocks.append(fenced(without_bodies(piece), "c"))
    return "\n\n".join(blocks) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="the reference pages of Python and C")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is not what it would be")
    check = parser.parse_args(arguments).check
    stale = []
    for page, text in ((ROOT / "docs/api-python.md", python_page()), (ROOT / "docs/api-c.md", c_page())):
        if not check:
            page.write_text(text, encoding="utf-8")
        elif not page.is_file() or page.read_text(encoding="utf-8") != text:
            stale.append(f"{page.relative_to(ROOT)}: is not what its sources say; run scripts/api_page.py")
    done = f"api: two pages {'are' if check else 'written from'} their sources'"
    print("\n".join(stale), file=sys.stderr) if stale else print(done)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
