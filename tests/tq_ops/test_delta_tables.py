"""The gated delta rule of every op table: the same bits however a prompt is cut, on any threads and beside any sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from delta_runs import VERSIONS, Run, same, whole
from op_contract.delta import Delta
from op_contract.suite import CPU, CUDA, Table
from op_tables import LAYER, TABLES, every_table, open_table

from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.stored import Advance
from haarkv.tq_ops.table import OpTable

SHAPES = [Delta(2, 4, 128, 128, (0,), (1,)), Delta(1, 3, 48, 80, (0,), (1,), taps=3), Delta(1, 1, 7, 21, (0,), (1,))]
SMALL = Delta(1, 2, 16, 12, (0,), (1,))
"""For an interpreter: heads that share keys, and columns that fill no program."""


@dataclass(frozen=True)
class Setup:
    """A table and a shape.

    Attributes:
        unit: tokens to count in: texts are six of these, short ones in an interpreter.
    """

    table: Table
    case: Delta
    unit: int

    def __str__(self) -> str:
        return f"{self.table.name}-{self.case}"

    def open(self) -> OpTable:
        return open_table(self.table)

    def run(self, sequences: int = 1) -> Run:
        return Run(self.open(), self.case, sequences, 6 * self.unit, self.table.device)

    def at_once(self, row: int = 0, length: int | None = None):
        """Outputs of a sequence's first tokens, all unless told, and its state behind them."""
        capacity = 6 * self.unit
        return whole(self.open(), self.case, row, capacity if length is None else length, capacity, self.table.device)


NAMES = {table.name for table in TABLES}
every_setup = pytest.mark.parametrize(
    "setup",
    [
        *(Setup(table, case, 15) for table in CPU if table.name in NAMES for case in SHAPES),
        Setup(CUDA, SMALL, 1),
    ],
    ids=str,
)


@every_setup
@pytest.mark.parametrize("chunk", [1, 4])
def test_a_prompt_in_pieces_is_the_whole_prompt_to_the_bit(setup, chunk):
    run, out, length = setup.run(), [], 6 * setup.unit
    for begin in range(0, length, chunk):
        out += run.run([0], [min(chunk, length - begin)])
    expected, state = setup.at_once()
    assert torch.equal(torch.cat(out), expected)
    assert same(run.state(), state)


@every_setup
def test_a_sequence_among_others_of_other_lengths_is_itself_to_the_bit(setup):
    run, out = setup.run(3), [[], [], []]
    for rows, counts in (([2, 0], [1, 2]), ([1], [1]), ([0, 1, 2], [1, 1, 1]), ([1, 2], [1, 2])):
        for row, chunk_output in zip(rows, run.run(rows, [count * setup.unit for count in counts]), strict=True):
            out[row].append(chunk_output)
    for row in range(3):
        chunk_output = torch.cat(out[row])
        expected, state = setup.at_once(row, len(chunk_output))
        assert torch.equal(chunk_output, expected)
        assert same(run.state(row), state)


@every_setup
def test_tokens_that_are_taken_back_were_never_there(setup):
    run, out = setup.run(), []
    out += run.run([0], [setup.unit])
    for keep_count in (1, 0, 1):
        right, begin = run.told[0], run.paging.length(run.ids[0])
        advance = Advance(run.cache, run.paging, [run.ids[0]], [2])
        run.told[0] = tuple(torch.cat([x[: begin + keep_count], -x[begin + keep_count :]]) for x in right)
        out.append(run.run([0], [2], advance.batch)[0][:keep_count])
        run.told[0] = right
        advance.keep([keep_count])
    expected, state = setup.at_once(length=setup.unit + 2)
    assert torch.equal(torch.cat(out), expected)
    assert same(run.state(), state)


@every_setup
def test_padding_reads_and_keeps_nothing(setup):
    """Two sequences of which one is not there, whose row is that of the other."""
    run = setup.run(2)
    run.run([0, 1], [1, 2])
    before = {name: tensor[1].clone() for name, tensor in run.cache.states[LAYER].tensors.items()}
    batch = run.batch([0, 1], [1, 1])
    padded_batch = replace(
        batch, slot_mapping=torch.tensor([batch.slot_mapping[0], -1]), rows=torch.tensor([batch.rows[0]] * 2)
    )
    mine, _ = run.run([0, 1], [1, 1], padded_batch)
    expected, state = setup.at_once(length=2)
    assert torch.equal(mine, expected[1:])
    assert same(run.state(), state)
    assert all(torch.equal(run.cache.states[LAYER].tensors[name][1], tensor) for name, tensor in before.items())


@every_setup
def test_a_forward_that_is_run_again_gives_the_same_and_a_row_that_is_free_begins_anew(setup):
    run = setup.run()
    run.run([0], [1])
    batch = run.batch([0], [2])
    first, again = (torch.cat(run.run([0], [2], batch)) for _ in range(2))
    assert torch.equal(first, again)
    run.paging.free(run.ids[0])
    run.ids[0] = run.paging.add()
    assert torch.equal(run.run([0], [2])[0], setup.at_once(length=2)[0])


@every_setup
def test_a_state_that_is_not_there_is_an_error_and_nothing_changes(setup):
    run = setup.run()
    run.run([0], [5])
    run.paging.take_back([run.ids[0]], [VERSIONS - 1])
    before = run.cache.states[LAYER].counts.clone()
    with pytest.raises(ValueError, match="too many were taken back"):
        run.run([0], [1])
    assert torch.equal(run.cache.states[LAYER].counts, before)


@every_setup
def test_small_rates_of_forgetting_are_exact(setup):
    """log(1 + exp(z)) where it is nearly nothing, times exp(9), which shows its last places."""
    run, theirs = setup.run(), Run(reference, setup.case, length=6 * setup.unit)
    x, _, b = run.told[0]
    for one in (run, theirs):
        one.weights[1].fill_(9.0)
    for z in (-15.5, -0.5, 30.0):
        run.told[0] = x, (z - run.weights[2]).expand_as(b), b
        theirs.told[0] = tuple(tensor.cpu() for tensor in run.told[0])
        ours, expected = run.run([0], [2])[0].cpu(), theirs.run([0], [2])[0]
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
        for one in (run, theirs):
            one.paging.take_back([one.ids[0]], [2])


def test_a_gpu_notes_a_state_that_is_not_there_and_computes_the_others():
    ops, device = open_table(CUDA), CUDA.device
    from haarkv.tq_ops.cuda import delta
    from haarkv.tq_ops.cuda.layout import fault_place

    run = Run(ops, SMALL, 2, 6, device)
    run.run([0, 1], [5, 1])
    run.paging.take_back([run.ids[0]], [VERSIONS - 1])
    state = run.cache.states[LAYER]
    before = [tensor[0].clone() for tensor in (state.counts, *state.tensors.values())]
    batch, fault = run.batch([1, 0], [1, 2]).to(device), ops.new_fault(device)
    inputs = (torch.cat([other[1:2], missing[1:3]]) for missing, other in zip(*run.told, strict=True))
    out = delta.advance(*inputs, *run.weights, run.cache.view(LAYER, batch), fault)
    assert fault_place(int(fault))[:3] == (LAYER, "state", 1)
    assert out[1:].isnan().all()
    assert torch.equal(out[:1], whole(ops, SMALL, 1, 2, 6, device)[0][1:])
    assert all(map(torch.equal, before, (tensor[0] for tensor in (state.counts, *state.tensors.values()))))
    with pytest.raises(ValueError, match="too many were taken back"):
        ops.raise_fault(fault, run.cache, batch)
    ops.raise_fault(fault, run.cache, batch)  # said once


@every_table
def test_results_do_not_depend_on_the_number_of_threads(table):
    ops, before, results = table.open(), torch.get_num_threads(), []
    case = replace(SHAPES[0], value_heads=6)
    try:
        for threads in (1, 2, 5, 32):
            torch.set_num_threads(threads)
            run = Run(ops, case)
            out = torch.cat([*run.run([0], [50]), *run.run([0], [1]), *run.run([0], [1])])
            results.append((out, run.state()))
    finally:
        torch.set_num_threads(before)
    for out, state in results[1:]:
        assert torch.equal(out, results[0][0])
        assert same(state, results[0][1])


def test_a_sequence_may_go_on_by_another_table():
    """The bookkeeping of versions is one."""
    run = Run(open_table(CPU[0]), SHAPES[0])
    tables, out = (run.ops, reference), []
    for turn in range(20):
        run.ops = tables[turn % 2]
        out += run.run([0], [1 + turn % 3])
    length = run.paging.length(run.ids[0])
    expected, state = whole(reference, SHAPES[0], length=length)
    torch.testing.assert_close(torch.cat(out), expected, rtol=1e-4, atol=1e-5)
    positions_seen = run.cache.states[LAYER].take(run.paging.places(run.ids[0]), length)["seen"]
    assert positions_seen.tolist() == list(range(length - len(positions_seen) + 1, length + 1))
    torch.testing.assert_close(run.state()["delta"], state["delta"], rtol=1e-4, atol=1e-5)
