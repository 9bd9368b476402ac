"""Instructions of the look-up on the device, counted by its own headers."""

import pytest
import torch
from npu_programs import LookUp

from haarkv.tq_ops.npu.aicore.count import count_tasks, total
from haarkv.tq_ops.npu.aicore.emission import emit

pytestmark = [pytest.mark.npu, pytest.mark.aicore]
# A cast and 19 operations of arithmetic, each one instruction for a whole tile; the casts take one or two more.
MOST_A_BLOCK = 24


def look_up(blocks):
    return [torch.zeros(128 * blocks, 64, dtype=torch.int8), torch.zeros(128 * blocks, 128).half()]


def test_a_block_of_codes_takes_one_instruction_an_operation(simulator, toolchain):
    """Nine selects took 13,331 vector instructions and 9,747 barriers a block."""
    counted = total(count_tasks(toolchain, emit(simulator, LookUp(256), look_up(2))))
    assert 2 * 19 <= counted.vector <= 2 * MOST_A_BLOCK
    assert counted.barriers <= 2 * MOST_A_BLOCK
    assert counted.cube == 0
    # A load and a store a block.
    assert counted.copies == 4
    # Ten operations on 128 x 64 and ten on 128 x 128 of two bytes, in lines of 256 bytes.
    assert abs(counted.repeats - 2 * (10 * 64 + 10 * 128)) <= 2 * 2 * 64
