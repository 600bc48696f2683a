#!/usr/bin/env python3
"""check_style.py: rules of the tree that a formatter does not know. Usage: check_style.py [--root FOLDER] [LIBRARY.so]

- the first line of a source says what it is, and starts with the file's own name in C and CUDA C; names are unique
- no tabs, no trailing blanks, one newline at the end; lines of C and CUDA C are as wide as .clang-format lets them be
- functions, methods of structs too, have at most 70 lines, files at most 600, of CUDA C 700, but for what LONG_FILES
  names
- CUDA C holds asm in src/cuda/ptx only
- the library reads the environment in settings.c only, by a function of src/system, and prints only where PRINTS says so
- every symbol that LIBRARY.so exports starts with fdm_ and is declared, and the other way round
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FUNCTION_LINES, FILE_LINES = 70, 600
# Kernels: one body that reads top to bottom.
KERNELS = re.compile(r"^src/families/cpu/(isa/.*|tile\w*\.h|vector_ops\.h)$")
CUDA = {".cu", ".cuh"}
CUDA_FILE_LINES = 700
LONG_FILES = {
    "include/flash_dmattn.h": 1400,  # the manual of every entry: most of it is comments
}
METHOD = " " * 4  # where methods of a struct begin
STRUCT = re.compile(r"(?:typedef )?struct\b[^()]*$")
ATTRIBUTE = re.compile(r"__(?:launch_bounds|cluster_dims)__\([^()]*\)")
ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b")
# The profile line and lines of the log, which the user asks for through the environment.
PRINTS = {"src/attention.c": 2, "src/cuda/cache_folder.c": 1, "src/tuner/first_use.c": 2, "src/tuning/store.c": 1}
PRINT = re.compile(r"\b(?:printf|fprintf|vprintf|vfprintf|puts|fputs|putchar|perror)\s*\(")
STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
TEXT = {".c", ".h", ".cu", ".cuh", ".py", ".rs", ".sh", ".md", ".build", ".options", ".toml", ".ini", ".yml"}
# Names that mean something to a tool and so may recur.
RECURRING = {"meson.build", "README.md", "__init__.py", "run", "Cargo.toml", "lib.rs"}


def tracked(root: pathlib.Path) -> list[str]:
    """Files of the tree, new ones included, ignored ones not."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in listed if (root / path).is_file()]


def column_limit() -> int:
    """Columns of a line of C, as .clang-format has them."""
    found = re.search(r"^ColumnLimit:\s*(\d+)", (ROOT / ".clang-format").read_text(), re.MULTILINE)
    assert found
    return int(found.group(1))


def code_of(text: str) -> str:
    """The text with comments and strings blanked, line numbers kept."""
    text = STRING.sub('""', text)
    return COMMENT.sub(lambda match: "\n" * match.group().count("\n"), text)


def first_line_fault(path: str, lines: list[str]) -> str | None:
    name, suffix = pathlib.PurePosixPath(path).name, pathlib.PurePosixPath(path).suffix
    if suffix in (".c", ".h", ".cu", ".cuh") and not lines[0].startswith(f"/* {name}: "):
        return f'{path}:1: must start with "/* {name}: " and say what the file is'
    line = lines[1] if lines[0].startswith("#!") and len(lines) > 1 else lines[0]
    if suffix == ".sh" and not line.startswith(f"# {name}: "):
        return f'{path}: must start with "# {name}: " and say what the file is'
    if suffix == ".py" and not line.startswith('"""'):
        return f"{path}: must start with a docstring that says what the file is"
    return None


def blank_faults(path: str, text: str) -> list[str]:
    faults = []
    for number, line in enumerate(text.split("\n"), 1):
        if "\t" in line and pathlib.PurePosixPath(path).name != "Makefile":
            faults.append(f"{path}:{number}: tab")
        if line != line.rstrip():
            faults.append(f"{path}:{number}: trailing blank")
    if text and not text.endswith("\n"):
        faults.append(f"{path}: no newline at the end")
    if text.endswith("\n\n"):
        faults.append(f"{path}: empty line at the end")
    return faults


def functions(lines: list[str]):
    """(name, first line number, number of lines) of each function of a formatted C file, methods of structs included."""
    head: dict[str, int | None] = {"": None, METHOD: None}
    in_struct = False
    for number, line in enumerate(lines, 1):
        if re.match(r"[A-Za-z_}]", line):
            in_struct, head[METHOD] = bool(STRUCT.match(line)), None
        if re.match(r"[A-Za-z_]", line):
            head[""] = number
        if in_struct and re.match(METHOD + r"[A-Za-z_~]", line):
            head[METHOD] = number
        for indent in ("", METHOD):
            if line == indent + "}" and head[indent] is not None:
                signature = ATTRIBUTE.sub("", " ".join(part.strip() for part in lines[head[indent] - 1 : number]))
                name = re.search(r"(\w+)\(", signature)
                if name and not re.match(r"(typedef|struct|enum|union)\b[^()]*\{", signature):
                    yield name.group(1), head[indent], number - head[indent] + 1
                head[indent] = None


def cuda_faults(path: str, text: str, columns: int) -> list[str]:
    lines = text.split("\n")
    faults = [
        f"{path}:{number}: {len(line)} columns; at most {columns}"
        for number, line in enumerate(lines, 1)
        if len(line) > columns
    ]
    if len(lines) - 1 > LONG_FILES.get(path, CUDA_FILE_LINES):
        faults.append(f"{path}: {len(lines) - 1} lines; at most {LONG_FILES.get(path, CUDA_FILE_LINES)}")
    for name, first, count in functions(lines):
        if count > FUNCTION_LINES:
            faults.append(f"{path}:{first}: {name}() has {count} lines; at most {FUNCTION_LINES}")
    if path.startswith("src/") and not path.startswith("src/cuda/ptx/"):
        faults += [
            f"{path}:{number}: asm; only src/cuda/ptx holds it, one wrapper for each instruction"
            for number, line in enumerate(code_of(text).split("\n"), 1)
            if ASM.search(line)
        ]
    return faults


def c_faults(path: str, text: str, columns: int) -> list[str]:
    lines = text.split("\n")
    # clang-format breaks other lines; those of macros end in a backslash behind the last column.
    faults = [
        f"{path}:{number}: {len(line)} columns; at most {columns}"
        for number, line in enumerate(lines, 1)
        if len(line.rstrip("\\ ")) > columns
    ]
    if len(lines) - 1 > LONG_FILES.get(path, FILE_LINES) and not KERNELS.match(path):
        faults.append(f"{path}: {len(lines) - 1} lines; at most {LONG_FILES.get(path, FILE_LINES)}")
    if not KERNELS.match(path):
        faults += [
            f"{path}:{first}: {name}() has {count} lines; at most {FUNCTION_LINES}"
            for name, first, count in functions(lines)
            if count > FUNCTION_LINES
        ]
    if path.startswith("src/"):
        code = code_of(text)
        reads = re.search(r"\b(?:(?:secure_)?getenv|system_variable)\s*\(|\benviron\b", code)
        if reads and path != "src/base/settings.c" and not path.startswith("src/system/"):
            faults.append(f"{path}: reads the environment; only src/base/settings.c may")
        prints = len(PRINT.findall(code))
        if prints != PRINTS.get(path, 0):
            faults.append(f"{path}: prints in {prints} places; the library prints in {PRINTS.get(path, 0)} there")
        if re.search(r"\b(?:exit|abort|_Exit|quick_exit)\s*\(", code):
            faults.append(f"{path}: ends the process; the library returns a status instead")
    return faults


def symbol_faults(library: str) -> list[str]:
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    names = [line.split()[-1] for line in listed.splitlines()]
    faults = [f"{library}: exports {name}; symbols start with fdm_" for name in names if not name.startswith("fdm_")]
    declared = set(re.findall(r"^FDM_API [^;]*?(\w+)\(", (ROOT / "include/flash_dmattn.h").read_text(), re.MULTILINE))
    exported = set(names)
    faults += [f"{library}: does not export {name}, which the header declares" for name in sorted(declared - exported)]
    faults += [f"{library}: exports {name}, which the header lacks" for name in sorted(exported - declared)]
    return faults


def unique_faults(paths: list[str]) -> list[str]:
    seen: dict[str, str] = {}
    faults = []
    for path in paths:
        name = pathlib.PurePosixPath(path).name
        # Stand-ins have the names of what they stand for, and devices answer the same questions.
        if path.startswith(("tests/emulator/ptx/", "bench/results/")):
            continue
        if name in seen and name not in RECURRING:
            faults.append(f"{path}: {seen[name]} has the same file name")
        seen.setdefault(name, path)
    return faults


def source_faults(root: pathlib.Path) -> list[str]:
    paths = tracked(root)
    columns = column_limit()
    faults = unique_faults(paths)
    for path in paths:
        suffix = pathlib.PurePosixPath(path).suffix
        if suffix not in TEXT:
            continue
        text = (root / path).read_text()
        faults += blank_faults(path, text)
        if text:
            fault = first_line_fault(path, text.split("\n"))
            faults += [fault] if fault else []
        if suffix in (".c", ".h"):
            faults += c_faults(path, text, columns)
        if suffix in CUDA:
            faults += cuda_faults(path, text, columns)
    return faults


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="rules of the tree that a formatter does not know")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="another tree, a git checkout")
    parser.add_argument("libraries", nargs="*")
    options = parser.parse_args(arguments)
    faults = source_faults(options.root)
    for library in options.libraries:
        faults += symbol_faults(library)
    print("\n".join(faults), file=sys.stderr) if faults else print("style: the tree keeps the rules")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
