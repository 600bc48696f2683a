"""other_header.py: the public header as an older or a newer version has it. Usage: other_header.py AGE HEADER OUTPUT

Every struct that begins with struct_bytes loses its last member where AGE is older, and has three more, `later`, where
AGE is newer.
"""

import pathlib
import re
import sys

STRUCT = re.compile(r"(?<=\n)(typedef struct \w+ \{\n    uint32_t struct_bytes;[^}]*)\}")


def older(struct: str) -> str:
    *members, last, _ = re.sub(r"/\*.*?\*/", "", struct, flags=re.DOTALL).split(";")
    if "," in last:  # one declaration of several
        members.append(last.rpartition(",")[0])
    return ";".join(members) + ";\n"


def main(arguments: list[str]) -> None:
    age, header, output = arguments
    newer = age == "newer"
    text, count = STRUCT.subn(
        lambda m: (m[1] + "    int64_t later[3];\n" if newer else older(m[1])) + "}", pathlib.Path(header).read_text()
    )
    if count < 18:
        sys.exit(f"other_header.py: {header} has {count} structs that grow; version 0.1.0 has 18")
    pathlib.Path(output).write_text(text)


main(sys.argv[1:])
