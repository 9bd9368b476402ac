"""Instructions of the look-up on the device, counted by its own headers."""

import pytest
import torch
from aicore.count import count_tasks, total
from aicore.emission import emit
from npu_programs import LookUp

pytestmark = [pytest.mark.npu, pytest.mark.aicore]
# A cast and 19 operations of arithmetic, each one instruction for a whole tile.
INSTRUCTIONS, ROWS = 20, 128


def look_up(blocks):
    return [torch.zeros(128 * blocks, 64, dtype=torch.int8), torch.zeros(128 * blocks, 128).half()]


def test_a_block_of_codes_takes_one_instruction_an_operation(simulator, toolchain):
    """Nine selects took 13,331 vector instructions and 9,747 barriers a block."""
    counted = total(count_tasks(toolchain, emit(simulator, LookUp(256), look_up(2))))
    assert counted.vector == 2 * INSTRUCTIONS
    assert counted.barriers < 2 * INSTRUCTIONS
    assert counted.cube == 0
    # A load and a store a block.
    assert counted.copies == 4
    # A row of 64 takes a line of 256 bytes to itself, as one of 128 does.
    assert counted.repeats == 2 * INSTRUCTIONS * ROWS
