#!/usr/bin/env python3
"""rust_bindings.py: writes bindings.rs and layout.rs of the Rust crate flash-dmattn-sys from include/flash_dmattn.h.

bindings.rs declares the whole header; a line of the header that is not understood is an error. layout.rs is a test: it
holds sizes, offsets and values that the C compiler gives. The compiler also compares each prototype, written back as C,
with the header's. Usage: rust_bindings.py [--check]. --check: says whether the crate has the files of the header.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Dict, List, NamedTuple, Optional, Tuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADER = ROOT / "include/flash_dmattn.h"
CRATE = ROOT / "bindings/rust/flash-dmattn-sys/src"
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
FOR_CPLUSPLUS = re.compile(r"^#ifdef __cplusplus\n.*?^#endif\n", re.DOTALL | re.MULTILINE)
DIRECTIVE = re.compile(r"^#(?:[^\n]*\\\n)*[^\n]*\n", re.MULTILINE)
MACRO = re.compile(r"^#define (FDM_VERSION\w*)\s+(\S+)", re.MULTILINE)
DECLARATION = re.compile(
    r"""\s*(?:typedef\ enum\ \w+\ \{(?P<values>[^}]*)\}\ (?P<enum>\w+);
      | enum\ \{(?P<constants>[^}]*)\};
      | (?:typedef\ )?struct\ (?P<struct>\w+)\ \{(?P<members>[^}]*)\}\ ?\w*;
      | typedef\ struct\ (?P<named>\w+)\ (?P=named);
      | static\ inline\ (?P<defaults>\w+)\ \w+_default\(void\)\ \{(?P<body>[^}]*)\}
      | FDM_API\ (?P<function>[^;]+);)\s*""",
    re.VERBOSE,
)
PRIMITIVES = {"void": "c_void", "char": "c_char", "double": "f64", "size_t": "usize"}
PRIMITIVES.update({f"{sign}int{bits}_t": f"{sign or 'i'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)})
NOTE = "// Written by scripts/rust_bindings.py from include/flash_dmattn.h, which is the manual.\n"


class Variable(NamedTuple):
    """A member, parameter or function. parameters: of a function, or of what a member points to; None of others."""

    name: str
    base: str
    const: bool = False
    stars: int = 0
    length: str = ""
    parameters: Optional[Tuple["Variable", ...]] = None

    def rust_type(self) -> str:
        if self.parameters is not None:
            return f'Option<unsafe extern "C" fn{self.rust_signature()}>'
        innermost = "*const " if self.const else "*mut "
        pointers = "*mut " * (self.stars - 1) + innermost if self.stars else ""
        one = pointers + PRIMITIVES.get(self.base, self.base)
        return f"[{one}; {self.length}]" if self.length else one

    def rust_signature(self) -> str:
        listed = ", ".join(f"{rust_name(each.name)}: {each.rust_type()}" for each in self.parameters or ())
        result = self._replace(parameters=None).rust_type()
        return f"({listed})" + ("" if result == "c_void" else f" -> {result}")

    def prototype(self) -> str:
        listed = ", ".join(f"{each.c_type()}" for each in self.parameters or ()) or "void"
        return f"{self.c_type()} {self.name}({listed});"

    def c_type(self) -> str:
        return ("const " if self.const else "") + self.base + " " + "*" * self.stars


class Header(NamedTuple):
    constants: Dict[str, Tuple[str, str]]  # type and value by name
    enums: List[str]
    opaque: List[str]
    structs: Dict[str, List[Variable]]
    defaults: Dict[str, Dict[str, str]]  # of a struct, what its *_default() assigns
    functions: List[Variable]


def rust_name(name: str) -> str:
    return f"r#{name}" if name in ("type", "match", "ref", "move", "in", "use", "where") else name


def at_commas(text: str) -> List[str]:
    """Parts between the commas that no bracket encloses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def variables(text: str) -> List[Variable]:
    """Of one declaration without its semicolon: `const fdm_tensor *q, *k`, `void (*run)(void *context)`."""
    pointer = re.fullmatch(r"(\w+) (\**)\(\*(\w+)\)\((.*)\)", text)
    if pointer:
        return [Variable(pointer[3], pointer[1], stars=len(pointer[2]), parameters=parameters(pointer[4]))]
    declared = re.fullmatch(r"(const )?(\w+) ([^()]*)", text)
    if not declared:
        sys.exit(f"rust_bindings.py: '{text}' of {HEADER.name} is not understood")
    found = []
    for each in at_commas(declared[3]):
        parts = re.fullmatch(r"(\**)(\w+)(?:\[(\w+)\])?", each)
        if not parts:
            sys.exit(f"rust_bindings.py: '{each}' in '{text}' of {HEADER.name} is not understood")
        found.append(Variable(parts[2], declared[2], bool(declared[1]), len(parts[1]), parts[3] or ""))
    return found


def parameters(text: str) -> Tuple[Variable, ...]:
    return () if text == "void" else tuple(variables(each)[0] for each in at_commas(text))


def parse(text: str) -> Header:
    macros = {name: ("&str" if '"' in value else "i32", value) for name, value in MACRO.findall(text)}
    header = Header(macros, [], [], {}, {}, [])
    text = re.sub(r"\s+", " ", DIRECTIVE.sub("", FOR_CPLUSPLUS.sub("", COMMENT.sub(" ", text)))).strip()
    place = 0
    while place < len(text):
        found = DECLARATION.match(text, place)
        if not found:
            sys.exit(f"rust_bindings.py: '{text[place : place + 70]}' of {HEADER.name} is not understood")
        place = found.end()
        if found["enum"]:
            header.enums.append(found["enum"])
        for each in at_commas(found["values"] or found["constants"] or ""):
            name, value = each.split(" = ")
            header.constants[name] = (found["enum"] or ("usize" if f"[{name}]" in text else "i32"), value)
        if found["struct"]:
            members = [member.strip() for member in found["members"].split(";")]
            header.structs[found["struct"]] = [each for member in members if member for each in variables(member)]
        if found["named"]:
            header.opaque.append(found["named"])
        if found["defaults"]:
            header.defaults[found["defaults"]] = assigned(found["body"])
        if found["function"]:
            declared, listed = found["function"][:-1].split("(", 1)
            header.functions.append(variables(declared)[0]._replace(parameters=parameters(listed)))
    return header._replace(opaque=[name for name in header.opaque if name not in header.structs])


def assigned(body: str) -> Dict[str, str]:
    values = {}
    for statement in filter(None, map(str.strip, body.split(";"))):
        *members, value = statement.split(" = ")
        if all(re.fullmatch(r"options\.\w+", member) for member in members) and re.fullmatch(r"-?\d+", value):
            values.update({member.partition(".")[2]: value for member in members})
        elif statement.split(" = ")[-1] not in ("FDM_ZERO", "sizeof options", "return options"):
            sys.exit(f"rust_bindings.py: '{statement}' of {HEADER.name} is not understood")
    return values


def bindings(header: Header) -> str:
    parts = [NOTE + "use super::*;\n"]
    parts += [f"pub type {name} = c_int;\n" for name in header.enums]
    parts += [f"pub const {name}: {kind} = {value};\n" for name, (kind, value) in header.constants.items()]
    parts += [f"#[repr(C)]\npub struct {name} {{\n    _private: [u8; 0],\n}}\n" for name in header.opaque]
    for name, members in header.structs.items():
        lines = "".join(f"    pub {rust_name(each.name)}: {each.rust_type()},\n" for each in members)
        parts.append(f"#[repr(C)]\n#[derive(Clone, Copy, Debug)]\npub struct {name} {{\n{lines}}}\n")
    parts.append("grows! {\n")
    for name, members in header.structs.items():
        if members[0].name == "struct_bytes":
            kinds = {each.name: each.rust_type() for each in members}
            values = (f"{field}: {value}_{kinds[field]}" for field, value in header.defaults.get(name, {}).items())
            parts.append(f"    {name} {{{', '.join(values)}}}\n")
    parts.append('}\nextern "C" {\n')
    parts += [f"    pub fn {each.name}{each.rust_signature()};\n" for each in header.functions]
    return "".join([*parts, "}\n"])


def from_compiler(header: Header) -> str:
    """The lines of layout.rs that say what the C compiler makes of the header."""
    lines = []
    for name, members in {**dict.fromkeys(header.enums, []), **header.structs}.items():
        offsets = [f'printf(" {rust_name(each.name)} %zu", offsetof({name}, {each.name}));' for each in members]
        lines += [f'printf("    {name} %zu %zu {{", sizeof({name}), _Alignof({name}));', *offsets, 'puts(" }");']
    lines.append('puts("}\\nvalues! {");')
    numbers = [name for name, (kind, _) in header.constants.items() if kind != "&str"]
    lines += [f'printf("    {name} %lld\\n", (long long){name});' for name in numbers]
    again = "\n".join(each.prototype() for each in header.functions)
    program = f'#include <stdio.h>\n#include "{HEADER}"\n{again}\nint main(void) {{\n' + "\n".join(lines) + "\n}\n"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = pathlib.Path(folder, "layout.c"), pathlib.Path(folder, "layout")
        source.write_text(program)
        subprocess.run(["cc", "-std=c11", "-Wall", "-Werror", "-o", binary, source], check=True)
        return subprocess.run([binary], check=True, capture_output=True, text=True).stdout


def layout(header: Header) -> str:
    names = "".join(f"    {each.name}\n" for each in header.functions)
    return f"{NOTE}layouts! {{\n{from_compiler(header)}}}\nexported! {{\n{names}}}\n"


def main(arguments: List[str]) -> int:
    text = HEADER.read_text(encoding="utf-8")
    header = parse(text)
    declared = len(re.findall(r"^FDM_API ", text, re.MULTILINE))
    if len(header.functions) != declared:
        sys.exit(f"rust_bindings.py: {len(header.functions)} of the {declared} functions of {HEADER.name} are understood")
    wrong = 0
    for name, made in (("bindings.rs", bindings(header)), ("layout.rs", layout(header))):
        path = CRATE / name
        if "--check" not in arguments:
            path.write_text(made)
        elif not path.is_file() or path.read_text() != made:
            print(f"{path.relative_to(ROOT)} is not that of the header; run scripts/rust_bindings.py", file=sys.stderr)
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
