"""Reading machine code: the hottest loop, what is spilled where."""

import machine_code
import pytest

# A loop that copies, then one that multiplies, then the jump to itself that ends every kernel.
CODE = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   LDSM.16.M88.4 R8, [R4] ;
        /*0050*/                   PRMT R5, R4, 0x7632, R5 ;
        /*0090*/                   HMMA.16816.F32 R16, R8, R12, R16 ;
        /*00b0*/              @!P1 BRA `(.L_x_2) ;
        /*00c0*/                   EXIT ;
.L_x_3:
        /*00d0*/                   BRA `(.L_x_3);
"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (None, (0, 0)),
        ("PRMT R5", (1, 0)),
        ("LDC R1", (0, 1)),
        ("BRA `(.L_x_3);", (0, 0)),  # the jump to itself, behind the end
    ],
)
def test_spilled_registers_are_counted_where_they_are_spilled(before, expected):
    spill = "        /*ffff*/                   STL [R1], R0 ;\n"
    lines = CODE.splitlines(keepends=True)
    text = "".join(spill + line if before and before in line else line for line in lines)
    assert machine_code.count_spills(text) == dict(zip(("in_loops", "once"), expected, strict=True))
    # Where another jump than that of a parted warp leads behind the end, what is there may be run by all.
    text = text.replace("EXIT ;", "BRA `(.L_x_3) ;\n        /*00c8*/                   EXIT ;")
    assert sum(machine_code.count_spills(text).values()) == bool(before)
