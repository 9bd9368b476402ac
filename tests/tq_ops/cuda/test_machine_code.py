"""Reading machine code: the hottest loop, what it keeps busy, what is spilled where."""

import machine_code
import pytest
from machine_code import parse, program_load

# A loop that copies, then one that multiplies, then the jump to itself that ends every kernel.
CODE = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0030*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   LDSM.16.M88.4 R8, [R4] ;
        /*0050*/                   PRMT R5, R4, 0x7632, R5 ;
        /*0060*/                   IMAD.MOV.U32 R6, RZ, RZ, R5 ;
        /*0070*/                   FFMA R7, R6, R6, R7 ;
        /*0080*/                   MUFU.EX2 R7, R7 ;
        /*0090*/                   HMMA.16816.F32 R16, R8, R12, R16 ;
        /*00a0*/                   LDS.64 R12, [R4+0x80] ;
        /*00b0*/              @!P1 BRA `(.L_x_2) ;
        /*00c0*/                   EXIT ;
.L_x_3:
        /*00d0*/                   BRA `(.L_x_3);
"""


def test_the_loop_of_the_tensor_cores_is_the_hottest_and_the_endless_one_is_none():
    loops = machine_code.loops(CODE)
    assert [len(loop) for loop in loops] in ([3, 8], [8])
    assert [one.op for one in machine_code.hottest_loop(CODE)][:2] == ["LDSM", "PRMT"]


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (None, (0, 0, 0)),
        ("LDG.E.128 R8", (1, 0, 0)),
        ("LDC R1", (0, 1, 0)),
        ("BRA `(.L_x_3);", (0, 0, 1)),  # the jump to itself, behind the end
    ],
)
def test_spilled_registers_are_counted_where_they_are_spilled(before, expected):
    spill = "        /*ffff*/                   STL [R1], R0 ;\n"
    lines = CODE.splitlines(keepends=True)
    text = "".join(spill + line if before and before in line else line for line in lines)
    assert vars(machine_code.count_spills(text)) == dict(zip(("in_loops", "once", "aside"), expected, strict=True))
    # Where another jump than that of a parted warp leads behind the end, what is there may be run by all.
    text = text.replace("EXIT ;", "BRA `(.L_x_3) ;\n        /*00c8*/                   EXIT ;")
    assert machine_code.count_spills(text).aside == 0


def test_predicates_and_modifiers_are_read():
    code, labels = parse(CODE)
    assert (code[3].op, labels[".L_x_1"]) == ("BRA", 1)
    assert [one.wavefronts for one in code[:5]] == [0, 4, 4, 0, 4]
    assert code[9].multiply_adds == 16 * 8 * 16
    group = parse("        /*0000*/                   HGMMA.64x16x16.F32 R32, R84, gdesc[UR8], RZ, !UPT ;\n")[0][0]
    assert group.multiply_adds == 64 * 16 * 16


def test_a_scheduler_issues_one_instruction_a_cycle_and_memory_serves_128_bytes():
    load = program_load(machine_code.hottest_loop(CODE), warps=8)
    assert (load.issue, load.memory) == (16, 48)  # 8 warps are 2 a scheduler; LDSM has 4 wavefronts and LDS.64 has 2
