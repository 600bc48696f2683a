"""compare_code.py reads what `fdm-checks compile --verbose` prints, and names each specialisation whose code differs."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

PATH = pathlib.Path(__file__).resolve().parents[2] / "scripts/compare_code.py"
sys.path.insert(0, str(PATH.parent))
spec = importlib.util.spec_from_file_location("compare_code", PATH)
compare_code = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare_code)


def printed(entry, code, constants, registers=168):
    return (f"fine sm_90 {entry}: {registers} registers, 0 spill bytes, 0 remarks, code {code:016x}\n"
            f"  {constants}\n")


def differences(before, after):
    return compare_code.differences(compare_code.codes_of(before), compare_code.codes_of(after))


def test_equal_code_in_another_order_is_no_difference():
    one, two = printed("forward", 1, "HEAD_DIM=64 DTYPE=1"), printed("forward", 2, "HEAD_DIM=128 DTYPE=1")
    again = printed("forward", 1, "DTYPE=1 HEAD_DIM=64")
    assert differences("3 of 9 specialisations\n" + one + two, two + again) == []


def test_other_code_is_named_with_both_hashes():
    (line,) = differences(printed("forward", 1, "A=1"), printed("forward", 2, "A=1", registers=96))
    assert line.startswith("sm_90 forward: 0000000000000001, 168 registers")
    assert "now 0000000000000002, 96, 0: A=1" in line


def test_what_one_side_lacks_is_a_difference():
    both = printed("forward", 1, "A=1")
    (line,) = differences(both + printed("forward", 3, "A=2"), both)
    assert line == "1 specialisations stand before alone, such as sm_90 forward A=2"


def test_a_specialisation_without_constants_is_read():
    assert len(compare_code.codes_of(printed("merge", 1, "") + printed("merge", 2, "A=1"))) == 2
