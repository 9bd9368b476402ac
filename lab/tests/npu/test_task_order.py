"""What a device may do in which order: PyPTO's own record of a layer's tasks, and every access that it leaves unordered."""

from dataclasses import replace

import pytest
from npu_calls import without_barrier
from npu_layers import learned_spec
from npu_programs import needs_pypto, store_case
from small_models import resize_config

from haarkv.models.catalog import read_config
from haarkv.models.qwen3_14b.npu import programs
from haarkv.models.qwen3_14b.npu.compile import PLAN, blank_model, layer_call
from haarkv.tq_ops.npu.program import order_arguments
from haarkv.tq_ops.npu.sides import layer_sides, window_shape
from lab.npu.aicore.conflicts import conflicts
from lab.npu.aicore.emission import Recorder, emit
from lab.npu.aicore.schedule import Operand, Schedule, Task, roots

pytestmark = needs_pypto
# Two tiles, of 16 sequences and of 2; one context takes several steps of 256 keys. Three tiles: two of one sequence.
DECODE = ((1,) * 18, (100, 600, *(100,) * 16))
SHORT_PREFILL = ((34, 3), (0, 100))
PREFILL = ((130, 3), (0, 100))


class Run:
    """What PyPTO makes of a call, and the passes through its loops."""

    def __init__(self, program, arguments):
        with Recorder() as simulator:
            emission = emit(simulator, program, arguments)
        self.program, self.schedule, self.roots = program, emission.schedule, roots(emission.schedule)
        # Kernel functions that only declare: the record says that a view of other shape is written.
        self.idle = {leaf.hash for leaf in emission.leaves if leaf.idle}

    def unordered_pairs(self):
        """Conflicts as (kind, scope of the first, of the second, tiles from one to the other, argument or `workspace`)."""
        owner = {id(task): root for root in self.roots for task in root.tasks}
        names = dict(zip(self.schedule.inputs, (a.name for a in self.program.arguments), strict=True))
        for conflict in conflicts(self.schedule):
            if not {conflict.first.leaf, conflict.then.leaf} & self.idle:
                one, other = owner[id(conflict.first)], owner[id(conflict.then)]
                yield conflict.kind, one.scope, other.scope, other.tile - one.tile, names.get(conflict.address, "workspace")


def run_layer(make, case, model="tiny", variant=lambda program: program, plan=PLAN):
    blank = blank_model(read_config(model))
    program = variant(make(blank.config, *layer_sides(plan, 0), window_shape(plan, 0)))
    return Run(program, layer_call(program, blank, *case, plan))


def decode(config, *sides):
    return programs.decode_program(config, *sides, step_tokens=256)


def late_appends(run):
    """Pairs of an APPEND and a KEYS that may read its rows, where it does not stand in an earlier step."""
    appends = [root for root in run.roots if root.scope == "APPEND"]
    keys = [root for root in run.roots if root.scope == "KEYS"]
    assert len(appends) > 1
    assert len(keys) > 1
    return [(a.place, k.place) for a in appends for k in keys if a.tile <= k.tile and a.step >= k.step]


def check_order(run, tokens, tiles):
    roots = run.roots
    assert sum(root.scope == "APPEND" for root in roots) == tokens
    assert {root.tile for root in roots} == set(range(tiles))
    assert late_appends(run) == []
    # Where a tile's attention begins, all that prepares it has ended, the clearing of its output as well.
    for tile in range(tiles):
        before = [root.step for root in roots if root.tile == tile and root.scope in ("QKV", "QUANTIZE", "APPEND", "ROTATE")]
        assert max(before) < min(root.step for root in roots if root.tile == tile and root.scope == "KEYS")


@pytest.mark.parametrize(("make", "most"), [(programs.decode_program, 200), (programs.prefill_program, 350)])
def test_a_launch_asks_for_no_more_workspace_than_the_guide_says(make, most):
    """Megabytes, of `tiny`; whatever the batch and context."""
    begin, end = run_layer(make, ((1,), (100,))).schedule.workspace
    assert 0 < end - begin <= most * 10**6


def window_plan(**window):
    return replace(learned_plan_spec(), **window).plan(1)


@pytest.mark.long
def test_decode_with_tokens_in_bf16_leaves_no_access_unordered():
    """Rings and sinks are written before anyone reads them: three sequences, one of them new."""
    run = run_layer(decode, ((1,) * 3, (300, 100, 0)), plan=window_plan(tail=20, sink=4))
    check_order(run, tokens=3, tiles=1)
    assert sum(root.scope == "KEEP" for root in run.roots) == 4
    assert max(root.step for root in run.roots if root.scope == "KEEP") < min(
        root.step for root in run.roots if root.scope == "KEYS"
    )
    assert list(run.unordered_pairs()) == []


@pytest.mark.long
def test_prefill_with_tokens_in_bf16_leaves_no_access_unordered_that_matters():
    """Two tiles of one sequence, as only a chunk of more than 128 tokens would have them."""
    run = run_layer(short_prefill, SHORT_PREFILL, plan=window_plan(tail=128, sink=4))
    check_prefill(run, 37, tiles=3)


@pytest.mark.long
def test_without_the_barrier_rings_may_be_read_stale():
    run = run_layer(decode, ((1,) * 3, (300, 100, 0)), plan=window_plan(tail=20, sink=4), variant=without_barrier)
    conflict_kinds = set(run.unordered_pairs())
    assert {("read after write", "KEEP", "KEYS", 0, name) for name in ("k_kept", "v_kept")} <= conflict_kinds


def check_prefill(run, tokens, tiles):
    check_order(run, tokens, tiles)
    # A tile may store its tokens while the tile before still loads their blocks: those rows lie behind its own tokens and
    # are masked, whatever finite numbers they hold. Where a step ends between the two tiles they are ordered.
    conflict_kinds = set(run.unordered_pairs())
    caches = {"k_codes", "k_scale", "v_codes", "v_scale"}
    expected = {("write after read", "KEYS", "APPEND", 1, name) for name in caches}
    if run.program.kept:
        # A ring has room for a chunk beside the tail: a place that a later tile of a sequence writes is masked as well.
        expected |= {("write after read", "KEYS", "KEEP", 1, name) for name in ("k_kept", "v_kept")}
    assert conflict_kinds <= expected


def short_prefill(config, *sides):
    return replace(programs.prefill_program(config, *sides), rows=32)


def learned_plan_spec():
    return learned_spec(resize_config(read_config("tiny"), num_layers=1))


def learned_plan():
    """Of a layer of `tiny`, K of two stages."""
    return learned_plan_spec().plan(1)


def check_found(run):
    """What the tables lack without the barrier: rows read before they are stored, and rows cleared after they are written."""
    assert late_appends(run)
    conflict_kinds = {kind[:3] for kind in run.unordered_pairs()}
    assert ("read after write", "APPEND", "KEYS") in conflict_kinds
    assert ("write after write", "ROTATE", "KEYS") in conflict_kinds


@pytest.mark.long
def test_without_the_barrier_fresh_rows_may_be_read_stale():
    check_found(run_layer(decode, ((1,) * 3, (100, 600, 20)), variant=without_barrier))


def test_the_store_program_writes_no_row_twice():
    tokens, case = 20, store_case(20)
    run = Run(case.program, order_arguments(case.program, case.tensors))
    assert sum(root.scope == "APPEND" for root in run.roots) == tokens
    assert list(run.unordered_pairs()) == []


def access(number, is_write, offset, shape, whole, after=()):
    """A task with one operand."""
    return Task(number, 1, (), (), (Operand(is_write, 0x1000, offset, shape, whole),), frozenset(after))


@pytest.mark.parametrize(
    ("one", "other", "kinds"),
    [
        (access(1, True, (3, 0), (1, 64), (9, 64)), access(2, False, (0, 0), (4, 64), (9, 64)), ["read after write"]),
        (access(1, False, (0, 0), (4, 64), (9, 64)), access(2, True, (3, 0), (1, 64), (9, 64)), ["write after read"]),
        (access(1, True, (3, 0), (1, 64), (9, 64)), access(2, True, (3, 0), (1, 64), (9, 64)), ["write after write"]),
        (access(1, True, (3, 0), (1, 64), (9, 64)), access(2, False, (0, 0), (4, 64), (9, 64), after=[1]), []),
        (access(1, True, (4, 0), (1, 64), (9, 64)), access(2, False, (0, 0), (4, 64), (9, 64)), []),
        (access(1, False, (0, 0), (4, 64), (9, 64)), access(2, False, (0, 0), (4, 64), (9, 64)), []),
        # Columns: the rows lie between each other, the pieces share nothing.
        (access(1, True, (0, 0), (9, 32), (9, 64)), access(2, True, (0, 32), (9, 32), (9, 64)), []),
        (access(1, True, (0, 0), (9, 33), (9, 64)), access(2, True, (0, 32), (9, 32), (9, 64)), ["write after write"]),
        # Another view of the same memory: [2, 3, 4] seen as [6, 4] and as [24].
        (access(1, True, (1, 1, 2), (1, 1, 1), (2, 3, 4)), access(2, False, (4, 2), (1, 1), (6, 4)), ["read after write"]),
        (access(1, True, (1, 1, 2), (1, 1, 1), (2, 3, 4)), access(2, False, (4, 3), (1, 1), (6, 4)), []),
        (access(1, True, (0, 1, 1), (2, 2, 2), (2, 3, 4)), access(2, False, (22,), (1,), (24,)), ["read after write"]),
        (access(1, True, (0, 1, 1), (2, 2, 2), (2, 3, 4)), access(2, False, (11,), (2,), (24,)), []),
    ],
)
def test_what_is_unordered_is_found_in_tasks_made_up(one, other, kinds):
    assert [conflict.kind for conflict in conflicts(Schedule(((one, other),), (), (0, 0)))] == kinds
    # A barrier stands between two steps.
    assert not list(conflicts(Schedule(((one,), (replace(other, after=frozenset()),)), (), (0, 0))))


@pytest.mark.long
def test_prefill_without_the_barrier_is_found_as_well():
    check_found(run_layer(programs.prefill_program, PREFILL, variant=without_barrier))


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "model", "plan"), [(decode, "tiny", PLAN), (decode, "tiny", None), (programs.decode_program, "random:14b", PLAN)]
)
def test_decode_leaves_no_access_unordered(make, model, plan):
    run = run_layer(make, DECODE, model, plan=plan or learned_plan())
    check_order(run, tokens=18, tiles=2)
    assert list(run.unordered_pairs()) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "case", "model", "plan"),
    [
        (short_prefill, SHORT_PREFILL, "tiny", PLAN),
        (short_prefill, SHORT_PREFILL, "tiny", None),
        (programs.prefill_program, PREFILL, "tiny", PLAN),
        (programs.prefill_program, PREFILL, "random:14b", PLAN),
    ],
)
def test_prefill_leaves_no_access_unordered_that_matters(make, case, model, plan):
    """With tiles of 32 tokens instead of 128 too: the same loops, sooner through."""
    check_prefill(run_layer(make, case, model, plan=plan or learned_plan()), sum(case[0]), tiles=3)
