"""Reading machine code: the hottest loop, what it keeps busy, and what follows for a card."""

import machine_code
import pytest
from machine_code import Load, Shape, load_of, parse, predict

from haarkv.benchmarks.cases import Case
from haarkv.benchmarks.report import gpu_predictions

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
    assert vars(machine_code.spilled(text)) == dict(zip(("in_loops", "once", "aside"), expected, strict=True))
    # Where another jump than that of a parted warp leads behind the end, what is there may be run by all.
    text = text.replace("EXIT ;", "BRA `(.L_x_3) ;\n        /*00c8*/                   EXIT ;")
    assert machine_code.spilled(text).aside == 0


def test_predicates_and_modifiers_are_read():
    code, labels = parse(CODE)
    assert (code[3].op, labels[".L_x_1"]) == ("BRA", 1)
    assert [one.wavefronts for one in code[:5]] == [0, 4, 4, 0, 4]
    assert code[9].multiply_adds == 16 * 8 * 16
    group = parse("        /*0000*/                   HGMMA.64x16x16.F32 R32, R84, gdesc[UR8], RZ, !UPT ;\n")[0][0]
    assert group.multiply_adds == 64 * 16 * 16


def test_units_are_busy_as_long_as_their_rates_say():
    load = load_of(machine_code.hottest_loop(CODE), warps=8)
    # 8 warps are 2 a scheduler. One PRMT: 2 cycles each. One IMAD on half of the FP32 lanes. LDSM 4 and LDS.64 2 wavefronts.
    assert load.units == {"issue": 16, "alu": 4, "fma": 4, "special": 16, "memory": 48, "tensor": 8}
    assert (load.bound_by, load.cycles) == ("memory", 48)
    # A group of four warps does one HGMMA together.
    grouped = parse("        /*0000*/                   HGMMA.64x16x16.F32 R32, R84, gdesc[UR8] ;\n")[0]
    assert load_of(grouped, warps=4).units["tensor"] == 64 * 16 * 16 / 2048


def test_a_prediction_is_the_slower_of_bytes_and_the_busiest_unit():
    case, shape = Case(8, 32768), Shape()
    light, heavy = (predict(Load({"issue": cycles}), 256, case, shape, launches=2) for cycles in (100.0, 5000.0))
    assert (light["bytes_us"], light["least_us"], light["bound_by"]) == (64.4, 64.4, "bytes")
    # 8 sequences x 8 heads x 128 passes over 132 processors at 1,755 MHz.
    assert heavy["least_us"] == round(8 * 8 * 128 * 5000 / 132 / 1755, 1)
    assert heavy["bound_by"] == "issue"
    assert light["likely_us"] == round(8 * 32768 * 1056 / 4.3e6 / 0.8 + 4.0, 1)


def test_what_is_predicted_is_what_the_page_compares_with():
    rows = gpu_predictions()
    assert {(row["batch"], row["context"]) for row in rows if row["drawn"]} == {
        (case.batch, case.context) for case in machine_code.CASES
    }
    for row in rows:
        assert row["bytes_us"] <= row["least_us"] < row["likely_us"]
