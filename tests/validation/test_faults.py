"""The table of planted faults: which there are, where each must be found, and that none of them changes nothing."""

import json
import re
from dataclasses import replace
from functools import cache
from itertools import cycle, islice, product
from pathlib import Path

import pytest
import torch
from at_length import MORE_JUDGE
from block_weights import in_blocks
from places import ROOT
from small_models import SMALL, resize_config, small_config, small_model

from haarkv.executors.cpu import CpuExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import load_model
from haarkv.models.text import load_tokenizer
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.formats.synthetic import calibration
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.stored import Advance
from haarkv.validation.faults.base import DRIVES
from haarkv.validation.faults.layer import LEARNED_KV, LONGEST, common_bugs, coordinate_faults, long_faults, published_faults
from haarkv.validation.faults.model import block_faults, forward_faults
from haarkv.validation.faults.states import delta_faults, delta_layers, small_hybrid
from haarkv.validation.faults.windows import WINDOW_SPEC, sliding_faults, window_faults, with_sliding_window
from haarkv.validation.layers.parts import snapshot
from haarkv.validation.layers.self_test import Setting, _row, first_layers, self_test

FROZEN = json.loads((Path(__file__).parent / "faults.json").read_text(encoding="utf-8"))
"""By group: layer, stages op by op, stages by whole layers (the first should be named), KV head, and the faults there."""
TQ4 = KVSpec("tq4")
LENGTHS = {"window": (90, 40), "long": (LONGEST, 9), "sliding": (LONGEST, 9)}
SMALL3 = resize_config(SMALL, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64, hidden_size=32, intermediate_size=48)


@cache
def groups(dtype, model_name="tiny"):
    """By name: a model, the cache that its faults need, and the faults of one of its layers."""
    tiny, hybrid = first_layers(load_model("tiny", str(dtype).removeprefix("torch.")), 3), small_hybrid(dtype, 100)
    if model_name == "small":
        tiny = small_model(SMALL3, dtype=dtype)
    blocks = in_blocks(
        small_model(small_config(num_heads=4, head_dim=64, hidden_size=256, intermediate_size=512), dtype=dtype)
    )
    heads, at = tiny.config.heads, 1
    learned_spec = KVSpec(LEARNED_KV, calibration=calibration(3, heads.num_kv_heads, heads.head_dim))
    return {
        "attention": (tiny, TQ4, [*published_faults(tiny, at), *common_bugs(tiny, at)]),
        "long": (tiny, TQ4, long_faults(tiny, at)),
        "forward": (tiny, TQ4, forward_faults(tiny)),
        "window": (tiny, WINDOW_SPEC, window_faults(tiny, at)),
        "sliding": (sliding := with_sliding_window(tiny, at), WINDOW_SPEC, sliding_faults(sliding, at)),
        "learned": (tiny, learned_spec, coordinate_faults(tiny, at)),
        "states": (hybrid, TQ4, delta_faults(hybrid, delta_layers(hybrid)[-1])),
        "blocks": (blocks, TQ4, list(block_faults(blocks, 1, "cpu"))),
    }


@pytest.mark.parametrize("group", FROZEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_fault_must_be_found_where_it_was_said_to_be(dtype, group):
    places = {}
    for fault in groups(dtype)[group][2]:
        place = fault.layer, fault.stages("ops"), fault.stages("layers"), fault.head
        places.setdefault(json.dumps(place), []).append(fault.name)
    assert {place: sorted(names) for place, names in places.items()} == {
        json.dumps(place): names for *place, names in FROZEN[group]
    }


def outcome(executor, model, spec, lengths):
    """Logits of a prompt in chunks, a step, a verify of which one token stays, more steps and another sequence in the first
    one's row; and what is stored then."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    states = {layer: replace(shape, versions=6) for layer, shape in config.state_shapes.items()}
    cache = PagedKVCache(spec.plan(config.num_layers), config.kv_shapes, num_blocks=8, states=states)
    paging = PagedSequences(8, cache.block_size)
    ids, logits = [paging.add() for _ in lengths], []

    def run(batch):
        tokens = torch.randint(config.vocab_size, (len(batch.positions),), generator=generator)
        logits.append(executor.head(executor.forward(tokens, batch, cache)))

    with torch.inference_mode():
        for begin in range(0, max(lengths), 60):
            rest = {ids[row]: min(60, length - begin) for row, length in enumerate(lengths) if length > begin}
            run(paging.batch(list(rest), list(rest.values())))
        run(paging.batch(ids, [1, 1]))
        verify = Advance(cache, paging, ids, [3, 3])
        run(verify.batch)
        verify.keep([1, 1])
        for sequences in (ids, ids, ids, ids[1:]):
            run(paging.batch(sequences, [1] * len(sequences)))
        paging.free(ids[0])
        run(paging.batch([paging.add()], [7]))
    fields = [snapshot(cache, layer) for layer in range(config.num_layers)]
    return [*logits, *(tensor for parts in fields for part_fields in parts.values() for tensor in part_fields.values())]


@pytest.mark.parametrize("group", FROZEN)
def test_every_fault_changes_something(group):
    """In FP32, in what comes out or what is stored; else nothing could find it."""
    model, spec, faults = groups(torch.float32, "small")[group]
    lengths = LENGTHS.get(group, (9, 4))
    right = CpuExecutor(model) if group == "blocks" else ReferenceExecutor(model)
    expected = outcome(right, model, spec, lengths)
    for fault in faults:
        try:
            other = outcome(fault.executor(model), model, spec, lengths)
        except NonFiniteError:
            continue
        assert not all(map(torch.equal, expected, other)), fault.name


def test_names_are_different_and_as_many_as_the_docs_say():
    faults_by_group = {group: faults for group, (_, _, faults) in groups(torch.float32).items()}
    published_table, table = published_faults(groups(torch.float32)["attention"][0], 1), faults_by_group["attention"]
    every = (
        published_table,
        table[len(published_table) :],
        [*faults_by_group["long"], *faults_by_group["forward"]],
        faults_by_group["learned"],
        faults_by_group["window"],
        faults_by_group["sliding"],
    )
    counts = re.search(
        r"(\d+) published bugs, (\d+) other .*?(\d+) in long prompts.*?(\d+) in synthetic learned.*?(\d+) in a tail and sinks"
        r".*?(\d+) in a sliding",
        (ROOT / "docs/validate.md").read_text(encoding="utf-8"), re.DOTALL,
    )  # fmt: skip
    assert [len(faults) for faults in every] == list(map(int, counts.groups()))
    names = [fault.name for faults in every for fault in faults]
    assert len(set(names)) == len(names)


# -- Found -------------------------------------------------------------------------------------------------------------------
NULLS = {}
"""What honest runs gave, by dtype and group."""
TOKENS = {"states": (9, 4), "learned": (90, 30), "forward": (40, 30), "blocks": (11, 5), "attention": (90, 30)} | LENGTHS
STEPS = {"window": 2, "sliding": 1, "states": 1, "forward": 1, "blocks": 1}


def of_each_kind():
    """Dtype, group, drive and name: one fault of each place; FP32 and BF16 by turns."""
    for group, places in FROZEN.items():
        for number, (*_, names) in enumerate(places):
            for turn, name in enumerate(names):
                for dtype, drive in product((torch.float32, torch.bfloat16), DRIVES):
                    plain = turn == 0 and (dtype == torch.bfloat16) == bool(number % 2)
                    yield pytest.param(dtype, group, drive, name, marks=() if plain else MORE_JUDGE)


# The rest runs with `make test-judge`.
@pytest.mark.parametrize(("dtype", "group", "drive", "name"), list(of_each_kind()))
def test_a_fault_is_found_in_its_layer_and_stage(dtype, group, drive, name):
    """As `tq dev self-test` plants and judges them, with what honest runs gave shared by all of a kind."""
    model, spec, faults = groups(dtype)[group]
    fault = next((fault for fault in faults if fault.name == name), None)
    if fault is None:
        pytest.skip(f"{dtype} has none")
    modes = ("teacher-forced", "free-running") if group == "forward" else ("teacher-forced",)
    prompts = [list(islice(cycle(code(row)), count)) for row, count in enumerate(TOKENS[group])]
    prompts = [[token % model.config.vocab_size for token in prompt] for prompt in prompts]
    setting = Setting(spec, prompts, STEPS.get(group, 0), "", modes, NULLS.setdefault((dtype, group), {}))
    row = _row(setting.report(model, fault.executor(model, drive)), drive, fault)
    assert row.caught, row


@cache
def code(row):
    """Tokens of code."""
    text = (ROOT / "tq_ops/reference.py").read_text(encoding="utf-8")[2000 * row :]
    return load_tokenizer("tiny", load_model("tiny").config).encode(text[:2000])


def test_the_self_test_says_what_it_does_not_find(monkeypatch):
    """Here since nothing is planted."""
    model = small_model(SMALL3)
    fault = next(fault for fault in published_faults(model, 1) if fault.name == "zero output")
    for name in ("common_bugs", "coordinate_faults", "window_faults", "long_faults", "forward_faults"):
        monkeypatch.setattr(f"{self_test.__module__}.{name}", lambda *_: [])
    monkeypatch.setattr(f"{self_test.__module__}.published_faults", lambda *_: [fault, replace(fault, name="nothing", ops={})])
    reported_rows = []
    rows = self_test([model], [list(range(7)), [3, 2, 1]], reported_rows.append)
    assert rows == reported_rows
    assert {row.fault for row in rows if not row.caught} == {"nothing"}
    assert {(row.driven, row.found) for row in rows if row.fault == "zero output"} == {
        ("ops", "layer 1 paged_attention"), ("layers", "layer 1 attention_mlp")
    }  # fmt: skip
