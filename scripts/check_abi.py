#!/usr/bin/env python3
"""check_abi.py: a program that was linked with the recorded library works with this one, as far as types can tell.

Usage: check_abi.py [--record] [LIBRARY HEADER_FOLDER]

LIBRARY has debugging information; without it the build folder's `abi-library` is built and taken. Its exported functions
and the types of the public header that they reach are compared by abidiff with tests/abi/libflash_dmattn.abi. What a
newer library may have (docs/decisions/014) is left out of the comparison: functions and enumerators that the record does
not know, fields behind the end of a struct that begins with struct_bytes, and what lies in the place of reserved words.
--record writes the record anew.
"""

from __future__ import annotations

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as tree

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "abi" / "libflash_dmattn.abi"
# Nothing of the record tells of the machine or the place where it was made.
ABIDW = ("abidw", "--exported-interfaces-only", "--drop-private-types", "--no-corpus-path", "--no-comp-dir-path",
         "--no-show-locs", "--no-elf-needed", "--no-architecture", "--no-write-default-sizes",
         "--no-parameter-names", "--type-id-style", "hash")


def offset_of(member: tree.Element) -> int:
    return int(member.get("layout-offset-in-bits", "0"))


def name_of(member: tree.Element) -> str:
    return member.find("var-decl").get("name", "")


def structs_of(abi: tree.Element) -> dict[str, list[tree.Element]]:
    """The structs by name, which several translation units may hold."""
    found: dict[str, list[tree.Element]] = {}
    for struct in abi.iter("class-decl"):
        if struct.find("data-member") is not None:
            found.setdefault(struct.get("name"), []).append(struct)
    return found


def drop_members(struct: tree.Element, first: int) -> int:
    """Removes the members from an offset on, and returns their number."""
    late = [member for member in struct.findall("data-member") if offset_of(member) >= first]
    for member in late:
        struct.remove(member)
    return len(late)


def hide_definitions(old: tree.Element, new: tree.Element) -> None:
    """Leaves of structs that `old` does not define nothing but their names; whether abidw drops such a definition depends
    on the compiler."""
    hidden = {struct.get("name") for struct in old.iter("class-decl")} - set(structs_of(old))
    for struct in new.iter("class-decl"):
        if struct.get("name") in hidden:
            for child in list(struct):
                struct.remove(child)
            struct.attrib.pop("size-in-bits", None)
            struct.set("is-declaration-only", "yes")


def drop_what_may_come(old: tree.Element, new: tree.Element) -> int:
    """Removes from `new` the fields and enumerators that a newer library may have beside `old`; from both what is in the
    place of reserved words. Returns the number of fields and enumerators that are new."""
    count = 0
    newer = structs_of(new)
    for name, structs in structs_of(old).items():
        members, size = structs[0].findall("data-member"), int(structs[0].get("size-in-bits"))
        # One that is not the last stands in the place of padding.
        reserved = [offset_of(member) for member in members[-1:] if name_of(member) == "reserved"]
        for struct in newer.get(name, []):
            if name_of(members[0]) == "struct_bytes" and int(struct.get("size-in-bits")) > size:
                count += drop_members(struct, size)
                struct.set("size-in-bits", str(size))
        if reserved:
            count += sum(drop_members(struct, reserved[0]) - 1 for struct in newer.get(name, []))
            for struct in structs:
                drop_members(struct, reserved[0])
    known = {enum.get("name"): {one.get("name") for one in enum.iter("enumerator")} for enum in old.iter("enum-decl")}
    for enum in new.iter("enum-decl"):
        names = known.get(enum.get("name"), set())
        for one in [one for one in enum.findall("enumerator") if names and one.get("name") not in names]:
            enum.remove(one)
            count += 1
    return count


def symbols_of(abi: tree.Element) -> set[str]:
    return {symbol.get("name") for symbol in abi.iter("elf-symbol")}


def compare(dump: pathlib.Path, folder: pathlib.Path) -> int:
    old, new = tree.parse(RECORD), tree.parse(dump)
    hide_definitions(old.getroot(), new.getroot())
    fields = drop_what_may_come(old.getroot(), new.getroot())
    old.write(folder / "old.abi")
    new.write(folder / "new.abi")
    found = subprocess.run(["abidiff", "--harmless", "--no-added-syms", folder / "old.abi", folder / "new.abi"],
                           capture_output=True, text=True, check=False)
    if found.returncode:
        print(found.stdout + found.stderr, file=sys.stderr)
        print("abi: programs that were linked with the recorded library do not work with this one; docs/decisions/014 says "
              "what may change, and scripts/check_abi.py --record records what is not released yet", file=sys.stderr)
        return 1
    functions, recorded = symbols_of(new.getroot()), symbols_of(old.getroot())
    print(f"abi: {len(recorded)} functions and their types are as recorded; new functions: {len(functions - recorded)}, "
          f"new fields and enumerators: {fields}")
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compares the library's ABI with the recorded one.")
    parser.add_argument("--record", action="store_true", help="write the record anew")
    parser.add_argument("library", nargs="?", type=pathlib.Path)
    parser.add_argument("headers", nargs="?", type=pathlib.Path, default=ROOT / "include")
    given = parser.parse_args(arguments)
    if not shutil.which("abidiff") or not shutil.which("abidw"):
        print("abi: not checked, abidiff is not here (Debian: abigail-tools)")
        return 0
    library = given.library or ROOT / "build" / "tests" / "abi" / "libflash_dmattn.so"
    if not given.library:
        subprocess.run(["ninja", "-C", ROOT / "build", "--quiet", "abi-library"], check=True)
    with tempfile.TemporaryDirectory() as place:
        dump = RECORD if given.record else pathlib.Path(place) / "dump.abi"
        subprocess.run([*ABIDW, "--headers-dir", given.headers, "--out-file", dump, library], check=True)
        return 0 if given.record else compare(dump, pathlib.Path(place))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
