"""The text of emitted C++: what the checks find in it, also once a fault is planted, and its instructions counted."""

import re

import pytest
import torch
from emitted_programs import compile_all
from npu_programs import needs_pypto

pytest.importorskip("pypto", reason="PyPTO is not installed")
from look_up_kernel import look_up, restore_keys

from haarkv.models.qwen3_14b.npu.compile import write_sources
from haarkv.tq_ops.formats.learned import COLUMNS
from haarkv.tq_ops.npu.learned import Layout
from haarkv.tq_ops.npu.program import HEAD_DIM
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator
from lab.npu.checks import CAPACITY, RULES, check, main
from lab.npu.text import UnknownTextError, parse

pytestmark = needs_pypto
PROGRAMS = ("decode", "prefill", "head", "store")


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_found_in_the_programs_of_tiny(cpp_sources, program):
    report = check(program, cpp_sources[program])
    assert [str(finding) for finding in report.findings] == []
    # Something was read, and it was all of it.
    assert report.functions == sum(path.startswith("kernel_aicore/") for path in cpp_sources[program]) > 3
    assert report.lines > 100
    assert 0 < report.fullest["UB"] <= CAPACITY["UB"]
    assert 0 < report.stack < report.stack_limit == 32 * 2**10


@pytest.mark.long
def test_nothing_is_found_in_the_programs_of_14b():
    for program, sources in compile_all("random:14b").items():
        report = check(program, sources)
        assert [str(finding) for finding in report.findings] == []
        assert report.functions > 3


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_tile_operation_of_the_text_is_read(cpp_sources, program):
    """As many as a plain search for calls finds, each with the operands that the text names."""
    for path, text in cpp_sources[program].items():
        if not path.startswith("kernel_aicore/"):
            continue
        calls = re.findall(r"^T[A-Z]\w*.*\);$", text, re.MULTILINE)
        function = parse(path, text)
        tensor_counts = [len(re.findall(r"\b\w+Tensor_\d+\b", call)) for call in calls]
        assert [sum(tile is not None for tile in o.operands) for o in function.operations] == tensor_counts


# -- Planted ----------------------------------------------------------------------------------------------------------------
def test_a_where_of_strided_views_is_found(emitted_strided_where):
    """The fault that once wrote 919 of 2,048 code bytes wrong: right in the interpreter, named here with its line."""
    report = check("planted", emitted_strided_where)
    (finding,) = report.findings
    assert "TWhereTT" in finding.says
    assert "[32 x 64]" in finding.says
    assert "[32 x 128]" in finding.says
    line = emitted_strided_where[finding.path].splitlines()[finding.line - 1]
    assert line.startswith("TWhereTT")
    assert str(finding).startswith(f"planted, {finding.function}, {finding.path}:{finding.line}: ")


def with_fault(sources, old, new):
    """The first kernel function with such a line, and that line changed."""
    for path, text in sources.items():
        if match := re.search(old, text, re.MULTILINE):
            return {path: text[: match.start()] + match.expand(new) + text[match.end() :]}
    raise AssertionError(f"no line to spoil: {old}")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (r"(\*UB_\w+ = .*get_imm\()0x\w+(\); // size: )0x\w+$", r"\g<1>0x2ff00\g<2>0x1000", "byte 200448 of UB, which has"),
        (r"(\*UB_\w+ = .*get_imm\()0x\w+\);", r"\g<1>0x10);", "begins at byte 16 of UB, no multiple of 32"),
        (r"(\*L0A_\w+ = .*get_imm\()0x\w+\);", r"\g<1>0x20);", "begins at byte 32 of L0A, no multiple of 512"),
        (r"__cb__ \*", r"__fbuf__ *", "is in memory __fbuf__, of which nothing is known"),
        (r"(using UB\w+ = TileTensor<half, LocalLayout2Dim<)\d+", r"\g<1>4096", "has 131072 bytes from 0 on"),
        (r"(using UB\w+ = TileTensor<float, LocalLayout2Dim<32, )8>", r"\g<1>5>", "rows of 20 bytes"),
        (r"(TileTensor\w+ ubTensor_\d+\(\(uint64_t\))(UB_\w+_T)", r"\g<1>((half *)\g<2> + 7)", "no multiples of 32"),
        (r"-cce-aicore-stack-size=0x8000", "-cce-aicore-stack-size=0x10", "its stack has 16"),
        (r"^extern \"C\" ", "", "cannot be read"),
        (r"^(using UBTileTensor\w+ = TileTensor<)half", r"\g<1>quarter", "a tile of unknown type"),
        (r"^TMul<.*?>\((ubTensor_\d+), ubTensor_\d+,", r"TNew(\1, ubTensor_99999,", "ubTensor_99999 is not declared"),
    ],
)  # fmt: skip
def test_what_is_planted_is_found(cpp_sources, old, new, says):
    sources = {f"kernel_aicore/{program}/{path}": text for program in PROGRAMS for path, text in cpp_sources[program].items()}
    findings = check("planted", with_fault(sources, old, new)).findings
    assert any(says in finding.says for finding in findings), [str(finding) for finding in findings]


TWO_WIDTHS = """extern "C" [aicore] void f(CoreFuncParam* param) {
half __ubuf__ *UB_A = (half __ubuf__ *)get_imm(0x0); // size: 0x2000
half *UB_A_T = (half *)get_imm(0x0); // size: 0x2000
using WIDE = TileTensor<half, LocalLayout2Dim<32, 128>, Hardware::UB>;
using NARROW_TileTensor = TileTensor<half, LocalLayout2Dim<32, 64>, Hardware::UB>;
using WIDE_TileTensor = TileTensor<half, LocalLayout2Dim<32, 128>, Hardware::UB>;
NARROW_TileTensor ubTensor_1((uint64_t)UB_A_T, (Shape2Dim(32, 64)));
WIDE_TileTensor ubTensor_2((uint64_t)UB_A_T, (Shape2Dim(32, 64)));
WIDE_TileTensor ubTensor_3((uint64_t)UB_A_T, (Shape2Dim(32, 64)));
CALL
}
"""


@pytest.mark.parametrize(
    ("call", "faulty"),
    [
        ("TNew<0>(ubTensor_1, ubTensor_2);", True),
        ("TNew<0>(ubTensor_3, ubTensor_2);", False),
        ("TAdd<LastUse3Dim<0, 0, 1>>(ubTensor_1, ubTensor_2, ubTensor_1);", False),
        ("TWhereTT(ubTensor_2, ubTensor_1, ubTensor_1, ubTensor_2, ubTensor_3);", False),
        ("TWhereTT(ubTensor_2, ubTensor_1, ubTensor_1, ubTensor_2, ubTensor_1);", True),
        ("TWhereTS(ubTensor_2, ubTensor_1, ubTensor_1, ubTensor_3, 1.0f);", False),
        ("TWhereTS(ubTensor_1, ubTensor_1, ubTensor_1, ubTensor_3, 1.0f);", True),
        ("TWhereST(ubTensor_1, ubTensor_1, ubTensor_1, 1.0f, ubTensor_3);", True),
        ("TWhereSS(ubTensor_1, ubTensor_1, ubTensor_2, 1.0f, 0.0f);", False),
        ("TCompare<5, 0>(ubTensor_1, ubTensor_2, ubTensor_1, 1.0f);", False),
        ("TCompare<5, 0>(ubTensor_1, ubTensor_2, ubTensor_1, ubTensor_2);", True),
        ("TGcd(ubTensor_1, ubTensor_1, ubTensor_2);", True),
    ],
)
def test_strides_are_compared_where_the_headers_assume_them_equal(call, faulty):
    findings = check("planted", {"kernel_aicore/f.cpp": TWO_WIDTHS.replace("CALL", call)}).findings
    assert [(finding.line, finding.function) for finding in findings] == ([(10, "f")] if faulty else [])


ROWS_OF_A_TALLER_TILE = """extern "C" [aicore] void f(CoreFuncParam* param) {
half __ubuf__ *UB_A = (half __ubuf__ *)get_imm(0x0); // size: 0x2000
half *UB_A_T = (half *)get_imm(0x0); // size: 0x2000
using UB_TileTensor = TileTensor<half, LocalLayout2Dim<32, 128>, Hardware::UB>;
UB_TileTensor ubTensor_1((uint64_t)((half *)UB_A_T + 2048), (SHAPE));
}
"""


_VALID = "RUNTIME_GetViewValidShapeDim"


@pytest.mark.parametrize(
    ("shape", "faulty"),
    [
        ("Shape2Dim(16, 128)", False),
        ("Shape2Dim(17, 128)", True),
        (f"Shape2Dim(({_VALID}(sym_1_dim_1, 16, 16)), ({_VALID}(sym_1_dim_0, 0, 128)))", False),
        (f"Shape2Dim(({_VALID}(sym_1_dim_1, 16, 32)), ({_VALID}(sym_1_dim_0, 0, 128)))", True),
        ("Shape2Dim(sym_1_dim_0, sym_1_dim_1)", True),
    ],
)  # fmt: skip
def test_rows_of_a_taller_tile_end_where_their_shape_says(shape, faulty):
    """Half of the rows from the middle on; as long as nothing is known of them, they count as many as the tile has."""
    findings = check("planted", {"kernel_aicore/f.cpp": ROWS_OF_A_TALLER_TILE.replace("SHAPE", shape)}).findings
    assert ["bytes from 4096 on; UB_A has 8192" in finding.says for finding in findings] == [True] * faulty


def test_rules_name_operands_that_are_there():
    for (name, tiles), rule in RULES.items():
        assert all(index < tiles for index in rule.same), name
        assert len(rule.same) != 1, name


def test_a_file_or_a_program_without_kernel_functions_is_named():
    with pytest.raises(UnknownTextError, match="no kernel function"):
        parse("a.cpp", "int main() {}")
    (finding,) = check("moved", {"elsewhere/x.cpp": ""}).findings
    assert "holds no kernel function" in str(finding)


def test_a_folder_is_checked_by_command(cpp_sources, tmp_path, capsys):
    """As `tq dev compile --cpp` writes it, and with one function spoiled."""
    write_sources(tmp_path / "cpp", {"head": cpp_sources["head"]})
    assert main([str(tmp_path / "cpp")]) == 0
    assert "0 findings" in capsys.readouterr().out
    file = next((tmp_path / "cpp/head/kernel_aicore").glob("*_aiv.cpp"))
    file.write_text(file.read_text(encoding="utf-8").replace("stack-size=0x8000", "stack-size=0x10"), encoding="utf-8")
    assert main([str(tmp_path / "cpp")]) == 1
    assert f"kernel_aicore/{file.name}:1: its variables take" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(tmp_path / "nothing")])
    assert "holds no emitted C++" in capsys.readouterr().err


# -- How few instructions restore packed keys: each operation once for a whole tile, nothing row by row ---------------------
@pytest.fixture(scope="module")
def plain():
    with Simulator() as simulator:
        yield simulator


EXPECTED_COUNTS = {2: (55, 1280), 3: (49, 1280), 4: (54, 1920), 5: (53, 2272)}
"""Operations of a block of 128 tokens, and their rows of 256 bytes. With `tq4` it is 15.5 and 1,920, of two blocks at once."""


def count_tiles(run):
    """Operations of the vector core, but for loads and stores, and the rows of 256 bytes that their results take."""
    work = [
        operation.operands
        for path, text in run.sources.items() if "aiv" in path
        for operation in parse(path, text).operations if operation.name not in ("TLoad", "TStore")
    ]  # fmt: skip
    # A cast has the rows of its source; the results are all by coordinate.
    rows = [operands[1 if operands[1] and operands[1].dtype == "int8_t" else 0] for operands in work]
    return len(work), sum(min(tile.rows or tile.layout[0], tile.layout[0]) for tile in rows)


@pytest.mark.parametrize("blocks", [1, 2])
def test_nothing_goes_row_by_row(blocks, plain):
    """A select or a comparison of tiles is a dozen instructions a row in the device's headers; arithmetic is one a tile."""
    rows = 128 * blocks
    run = plain.run(look_up(rows), [torch.zeros(rows, 64, dtype=torch.int8), torch.zeros(rows, 128).half()], Mode.COMPILE)
    text = "".join(run.sources.values())
    assert "TMul<" in text
    # A load a block, a store for each half, and each operation once for the whole tile; between them nothing is copied.
    calls = re.findall(r"^(T[A-Z]\w*).*\);$", text, re.MULTILINE)
    assert (calls.count("TLoad"), calls.count("TStore")) == (blocks, 2)
    assert not [name for name in ("TWhere", "TCompare", "TGather") if name in text]
    # Casts of a block, and 29 operations of arithmetic, of half a line a vector.
    assert count_tiles(run) == (29 + blocks, 64 * (29 * blocks + blocks))


@pytest.mark.parametrize("bits", COLUMNS)
def test_learned_keys_are_restored_by_one_task_without_copies(plain, bits):
    """One load, a store for each part, and as much arithmetic as was counted; nothing goes row by row or spills."""
    layout = Layout(COLUMNS[bits])
    arguments = [torch.zeros(128, layout.nbytes(HEAD_DIM), dtype=torch.int8), torch.zeros(layout.width(HEAD_DIM), 128).half()]
    run = plain.run(restore_keys(layout), arguments, Mode.COMPILE)
    calls = re.findall(r"^(T[A-Z]\w*).*\);$", "".join(run.sources.values()), re.MULTILINE)
    assert set(calls) == {"TLoad", "TCast", "TTrans", "TMulS", "TAddS", "TSubS", "TSub", "TMul", "TStore"} | (
        {"TAdd"} if layout.lower_pieces else set()
    )
    assert (calls.count("TLoad"), calls.count("TStore")) == (1, len(layout.parts(HEAD_DIM)))
    assert count_tiles(run) == EXPECTED_COUNTS[bits]
