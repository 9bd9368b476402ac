"""The gated delta rule in C++: the same bits however a prompt is cut, on any threads and beside any other sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from delta_runs import VERSIONS, Run, same, whole
from op_tables import LAYER, every_table

from haarkv.tq_ops import reference
from haarkv.tq_ops.kv.rollback import Advance
from haarkv.validation.ops.delta import Delta

SHAPES = [Delta(2, 4, 128, 128, (0,), (1,)), Delta(1, 3, 48, 80, (0,), (1,), taps=3), Delta(1, 1, 7, 21, (0,), (1,))]


@every_table
@pytest.mark.parametrize("case", SHAPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_a_prompt_in_pieces_is_the_whole_prompt_to_the_bit(table, case, chunk):
    ops = table.open()
    run, out = Run(ops, case), []
    for begin in range(0, 90, chunk):
        out += run.run([0], [min(chunk, 90 - begin)])
    expected, state = whole(ops, case)
    assert torch.equal(torch.cat(out), expected)
    assert same(run.state(), state)


@every_table
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_a_sequence_among_others_of_other_lengths_is_itself_to_the_bit(table, case):
    ops = table.open()
    run, out = Run(ops, case, sequences=3), [[], [], []]
    for rows, counts in (([2, 0], [5, 17]), ([1], [1]), ([0, 1, 2], [1, 1, 1]), ([1, 2], [60, 9]), ([0, 2], [72, 75])):
        for row, told in zip(rows, run.run(rows, counts), strict=True):
            out[row].append(told)
    for row in (0, 1, 2):
        length = run.paging.length(run.ids[row])
        expected, state = whole(ops, case, row, length)
        assert torch.equal(torch.cat(out[row]), expected)
        assert same(run.state(row), state)


@every_table
def test_results_do_not_depend_on_the_number_of_threads(table):
    ops, before, found = table.open(), torch.get_num_threads(), []
    case = replace(SHAPES[0], value_heads=6)
    try:
        for threads in (1, 2, 5, 32):
            torch.set_num_threads(threads)
            run = Run(ops, case)
            out = torch.cat([*run.run([0], [50]), *run.run([0], [1]), *run.run([0], [1])])
            found.append((out, run.state()))
    finally:
        torch.set_num_threads(before)
    for out, state in found[1:]:
        assert torch.equal(out, found[0][0])
        assert same(state, found[0][1])


@every_table
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_tokens_that_are_taken_back_were_never_there(table, case):
    ops = table.open()
    run, out = Run(ops, case), []
    out += run.run([0], [20])
    for kept in (2, 0, 1, 4, 3):
        right, begin = run.told[0], run.paging.length(run.ids[0])
        advance = Advance(run.cache, run.paging, [run.ids[0]], [4])
        run.told[0] = tuple(torch.cat([x[: begin + kept], -x[begin + kept :]]) for x in right)
        out.append(run.run([0], [4], advance.batch)[0][:kept])
        run.told[0] = right
        advance.keep([kept])
    length = run.paging.length(run.ids[0])
    expected, state = whole(ops, case, length=length)
    assert torch.equal(torch.cat(out), expected)
    assert same(run.state(), state)


@every_table
def test_a_forward_that_is_run_again_gives_the_same(table):
    ops = table.open()
    run = Run(ops, SHAPES[0])
    run.run([0], [11])
    batch = run.batch([0], [7])
    first, again = (torch.cat(run.run([0], [7], batch)) for _ in range(2))
    assert torch.equal(first, again)


@every_table
def test_a_row_of_a_sequence_that_ended_begins_anew(table):
    ops = table.open()
    run = Run(ops, SHAPES[0])
    run.run([0], [9])
    run.paging.free(run.ids[0])
    run.ids[0] = run.paging.add()
    assert torch.equal(run.run([0], [90])[0], whole(ops, SHAPES[0])[0])


@every_table
def test_padding_reads_and_keeps_nothing(table):
    ops = table.open()
    run = Run(ops, SHAPES[0], sequences=2)
    run.run([0, 1], [5, 6])
    batch = run.batch([0, 1], [1, 1])
    padded = replace(batch, slot_mapping=torch.tensor([batch.slot_mapping[0], -1]), rows=torch.tensor([batch.rows[0]] * 2))
    other = run.state(1)
    mine = run.run([0, 1], [1, 1], padded)[0]
    alone = Run(ops, SHAPES[0])
    alone.run([0], [5])
    assert torch.equal(mine, alone.run([0], [1])[0])
    assert same(run.state(), alone.state())
    run.paging.take_back([run.ids[1]], [1])
    assert same(run.state(1), other)


@every_table
def test_tokens_that_nobody_has_seen_are_an_error_and_nothing_changes(table):
    ops = table.open()
    run = Run(ops, SHAPES[0])
    run.run([0], [30])
    run.paging.take_back([run.ids[0]], [VERSIONS - 1])
    before = run.cache.states[LAYER].seen.clone()
    with pytest.raises(ValueError, match="too many were taken back"):
        run.run([0], [2])
    assert torch.equal(run.cache.states[LAYER].seen, before)


def test_the_states_of_both_tables_fit_each_other():
    """A sequence may go on by the other table: the bookkeeping of versions is one."""
    from haarkv.tq_ops.cpu.ops import CpuOps

    run = Run(CpuOps(), SHAPES[0])
    tables, out = (run.ops, reference), []
    for turn in range(20):
        run.ops = tables[turn % 2]
        out += run.run([0], [1 + turn % 3])
    length = run.paging.length(run.ids[0])
    expected, state = whole(reference, SHAPES[0], length=length)
    torch.testing.assert_close(torch.cat(out), expected, rtol=1e-4, atol=1e-5)
    seen = run.cache.states[LAYER].take(run.paging.places(run.ids[0]), length)["seen"]
    assert seen.tolist() == list(range(length - len(seen) + 1, length + 1))
    torch.testing.assert_close(run.state()["delta"], state["delta"], rtol=1e-4, atol=1e-5)
