"""What is read before anything is compiled: kernel functions, headers and the scheduler's record, as texts."""

import random

import pytest

from haarkv.tq_ops.errors import InputError
from lab.npu.aicore.leaf import distinct, read_leaf, read_leaves
from lab.npu.aicore.schedule import read_schedule, topological_order
from lab.npu.aicore.toolchain import find_toolchain, host_header

KERNEL = """#define __TILE_FWK_AICORE__ 1
#include "../kernel_aicpu/expression_0.h"
#include "TileOpImpl.h"

// funcHash: 77

extern "C" [aicore] void TENSOR_APPEND_Unroll1_PATH0_hiddenfunc0_19_0_945(CoreFuncParam* param, int64_t GMStackBase) {
uint64_t sym_{a}_dim_0 = (RUNTIME_COA_GET_PARAM_VALID_SHAPE(2, 1, 0)); //GET_PARAM
using {usings}
{tensors}
TVecDup<float>(ubTensor_{b}, 1);
SUBKERNEL_PHASE1
TLoad(ubTensor_{c}, ubTensor_{b});
}

// kernel compilation command:
// bisheng -c
"""
USINGS = [
    "UBTileTensorFP32Dim2_{d} = TileTensor<float, LocalLayout2Dim<1, 16>>;",
    "UBTileTensorFP32Dim2_{e} = TileTensor<float, 2>;",
]
TENSORS = [
    "UBTileTensorFP32Dim2_{d} ubTensor_{b}((uint64_t)UB_S0, sym_{a}_dim_0);",
    "UBTileTensorFP32Dim2_{e} ubTensor_{c}(1);",
]


def kernel(numbers, swap):
    usings, tensors = (USINGS[::-1], TENSORS[::-1]) if swap else (USINGS, TENSORS)
    text = KERNEL.replace("{usings}", "\nusing ".join(usings)).replace("{tensors}", "\n".join(tensors))
    for name, number in zip("abcde", numbers, strict=True):
        text = text.replace("{" + name + "}", str(number))
    return text


def test_equal_kernel_functions_of_two_compilations_are_one_leaf():
    """PyPTO numbers its names anew and orders its declarations anew each time."""
    one = read_leaf("kernel_aicore/x_0_aiv.cpp", kernel((595, 254, 255, 72, 73), swap=False))
    two = read_leaf("kernel_aicore/x_0_aiv.cpp", kernel((12, 9, 4, 8, 3), swap=True))
    assert one.symbol == two.symbol
    assert one.text == two.text
    assert (one.scope, one.kind, one.hash) == ("APPEND", "aiv", 77)
    assert len(distinct([one, two])) == 1


def test_another_operation_or_core_is_another_leaf():
    text = kernel((1, 2, 3, 4, 5), swap=False)
    leaves = [
        read_leaf("x_aiv.cpp", text),
        read_leaf("x_aiv.cpp", text.replace("Dim<1, 16>", "Dim<1, 32>")),
        read_leaf("x_aiv.cpp", text.replace("TLoad(ubTensor_3, ubTensor_2)", "TLoad(ubTensor_2, ubTensor_3)")),
        read_leaf("x_aic.cpp", text),
    ]
    assert len(distinct(leaves)) == 4


def test_no_declaration_is_lost():
    leaf = read_leaf("x_aiv.cpp", kernel((1, 2, 3, 4, 5), swap=True))
    lines = leaf.text.splitlines()
    assert sum(line.startswith("using ") for line in lines) == 2
    # Declared before they are used, also by an operation before the first phase.
    first_use = next(i for i, line in enumerate(lines) if line.startswith("TVecDup"))
    assert max(i for i, line in enumerate(lines) if line.startswith("UBTile")) < first_use


def test_a_kernel_function_that_only_declares_is_idle_and_one_operation_makes_it_busy():
    text = kernel((1, 2, 3, 4, 5), swap=False)
    operations = ["TVecDup<float>(ubTensor_2, 1);\n", "TLoad(ubTensor_3, ubTensor_2);\n"]
    assert not read_leaf("x_aiv.cpp", text).idle
    for operation in operations:
        assert not read_leaf("x_aiv.cpp", text.replace(operation, "")).idle
    for operation in operations:
        text = text.replace(operation, "")
    assert read_leaf("x_aiv.cpp", text).idle


def test_what_is_no_kernel_function_is_refused():
    with pytest.raises(InputError, match="is not supported"):
        read_leaf("x_aiv.cpp", "int main() {}")
    assert read_leaves({"kernel_aicpu/expression_0.h": "", "kernel_aicpu/control.cpp": ""}) == []


def test_headers_lose_the_attributes_of_the_device_alone():
    text = (
        '#include "aicore_runtime.h"\n#include "mte.h"\n#include "distributed/common.h"\n#include "vector/mte.h"\nint a[4];\n'
    )
    header = host_header("TileOpImpl.h", "[aicore] inline int f();\n[host, aicore] int g();\n" + text)
    assert "aicore]" not in header
    assert '"mte.h"' not in header.replace('"vector/mte.h"', "")
    assert '#include "vector/mte.h"' in header
    assert "int a[4];" in header
    assert host_header("other.h", '#include "mte.h"\n') == '#include "mte.h"\n'


RECORD = """[a.cpp:1][MACHINE]:#trace: #CtrlEvent{_,Workspace{range{0x1000,0x2000,0x1000}}}
[a.cpp:1][MACHINE]:#trace: #CtrlEvent{_,InputTensorElement{1,0x5000,64}}
[a.cpp:1][MACHINE]:#trace: #CtrlEvent{_,InputTensorElement{0,0x4000,64}}
[a.cpp:1][MACHINE]:#trace: #REvent{RUid{0,1,7},RActDup{name{"TENSOR_KEYS_Unroll1_PATH0_hiddenfunc0_root"}}}
[a.cpp:2][MACHINE]:func 0 [0] #predCnt:0 #succList: [a]
[a] #predCnt:1 #succList: [] #stitch:[[0]=1!0]
 #funcKey: 0 #gmStackBase: 1000 #stackSize: 0 #workspace: 1000
#funcData: [
  [0]  #funcHash: 77 #funcIndex: 4 #taskID:0 #opMagic: 10003
  #invokeAttrs :  in:@(rawidx:0 attridx:1), 2, 0, 1, 8, 32, 8, 1, 8,  out:@(rawidx:1 attridx:10), 0, 0, 1, 8, 1, 8, 1, 8, $
 other attr:5, 18446744073709551615, $
  [10]  #funcHash: 0 #funcIndex: 0 #taskID:10 #opMagic: 10010
  #invokeAttrs : $
 other attr:0, $
  #rawTensorAddrs: $
   4000(location:1 offsetOrIdex: 0), 1040(location:0 offsetOrIdex: 40), $
].
[a.cpp:2][MACHINE]:func 1 [0] #predCnt:1 #succList: []
 #funcKey: 1 #gmStackBase: 1000 #stackSize: 0 #workspace: 0
#funcData: [
  [0]  #funcHash: 78 #funcIndex: 2 #taskID:1048576 #opMagic: 10010
  #invokeAttrs : $
 other attr:2, 9, $
  #rawTensorAddrs: $
].
[a.cpp:2][MACHINE]:func 0 [0] #predCnt:0 #succList: []
 #funcKey: 0 #gmStackBase: 1000 #stackSize: 0 #workspace: 1000
#funcData: [
  [0]  #funcHash: 79 #funcIndex: 4 #taskID:0 #opMagic: 10003
  #invokeAttrs : $
 other attr:1, $
  #rawTensorAddrs: $
].
""".replace("$", "")


def test_a_record_gives_steps_tasks_attributes_and_edges():
    schedule = read_schedule(RECORD)
    assert schedule.inputs == (0x4000, 0x5000)
    assert schedule.workspace == (0x1000, 0x2000)
    assert schedule.scopes == {(0, 1): "KEYS"}
    assert [[task.leaf for task in step] for step in schedule.steps] == [[77, 0, 78], [79]]
    first, joins, second = schedule.steps[0]
    assert first.attributes == (4, 0, 2, 0, 1, 8, 32, 8, 1, 8, 1, 0, 0, 1, 8, 1, 8, 1, 8, 5, 2**64 - 1)
    assert [(o.is_write, o.address, o.offset, o.whole) for o in first.operands] == [
        (False, 0x4000, (2, 0), (32, 8)),
        (True, 0x1040, (0, 0), (1, 8)),
    ]
    assert second.attributes == (2, 9)
    assert (first.after, joins.after, second.after) == (frozenset(), {0}, {10})
    assert [task.leaf for task in schedule.tasks] == [77, 78, 79]


def test_a_record_of_something_else_is_refused():
    with pytest.raises(InputError, match="is not what PyPTO"):
        read_schedule("nothing of it")
    with pytest.raises(InputError, match="spills"):
        read_schedule(RECORD.replace("#stackSize: 0", "#stackSize: 40"))


@pytest.mark.parametrize("missing_function", ["last", "first"])
def test_a_record_that_lacks_a_function_is_refused(missing_function):
    """Lines of two threads that run into each other hide one; a step then lacks tasks and edges."""
    record = RECORD.replace("func 1 [0]", "fun") if missing_function == "last" else RECORD.replace("func 1 [0]", "func 2 [0]")
    with pytest.raises(InputError, match="lacks a function"):
        read_schedule(record)


def test_orders_by_chance_keep_the_edges_and_differ():
    step = read_schedule(RECORD).steps[0]
    # Ten tasks that wait for none, and the three of the record.
    more = tuple(type(step[0])(100 + i, 5, (), (), (), frozenset()) for i in range(10))
    orders = {tuple(t.number for t in topological_order(step + more, random.Random(seed))) for seed in range(30)}
    assert len(orders) > 20
    for order in orders:
        assert order.index(0) < order.index(10) < order.index(1 << 20)
    circle = tuple(type(t)(t.number, t.leaf, (), (), (), frozenset({t.number})) for t in step)
    with pytest.raises(ValueError, match="circle"):
        list(topological_order(circle))


def test_a_missing_compiler_or_folder_is_said_in_one_line(tmp_path):
    pytest.importorskip("pypto")
    with pytest.raises(InputError, match=r"holds no include/pto/pto-inst.hpp"):
        find_toolchain(tmp_path)
    header = tmp_path / "include/pto/pto-inst.hpp"
    header.parent.mkdir(parents=True)
    header.touch()
    with pytest.raises(InputError, match="no-such-clang is not found"):
        find_toolchain(tmp_path, "no-such-clang")
    with pytest.raises(InputError, match="clang 19 or newer"):
        find_toolchain(tmp_path, "g++")
