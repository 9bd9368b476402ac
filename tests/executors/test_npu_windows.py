"""Tokens that stay in BF16 on the NPU programs: what the host hands over, whom it refuses, and layers in the interpreter."""

import pytest
import torch
from npu_layers import CONFIG, fill_cache
from npu_programs import with_pypto
from small_models import random_tokens, resize_config, small_model

from haarkv.executors import catalog
from haarkv.executors.npu import NpuExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.qwen3_14b.npu import inputs, programs
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.npu.program import AttentionShape
from haarkv.tq_ops.npu.sides import keeping, layer_sides, window_shape
from haarkv.validation.layers import candidate as candidate_runs
from haarkv.validation.layers.runner import validate

WINDOW_OPTIONS = [{"tail": 20, "sink": 3}, {"tail": 1}, {"sink": 70}, {"tail": 300, "sink": 70}]


# -- What the host hands over ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("window_options", WINDOW_OPTIONS, ids=str)
def test_places_that_a_query_sees_hold_the_tokens_that_the_reference_sees(window_options):
    spec = KVSpec("tq4", **window_options)
    cache, paging, sequences = fill_cache(CONFIG, spec, [299, 0, 130], seed=1)
    shape = window_shape(cache.plan, 0)
    batch = paging.batch(sequences, [5, 9, 64])
    k, _ = cache.kv[0].windows
    window_plan = keeping(k, shape, batch)
    # Which token lies where, once these are written; then what each query's visible places hold.
    for row, position in enumerate(batch.positions.tolist()):
        tokens = torch.arange(position + 1)
        expected = tokens[k.visible(torch.tensor(position), position + 1)]
        assert sorted(k.places(expected).tolist()) == (window_plan.seen[row] == 0).nonzero().flatten().tolist()
    heads, window = CONFIG.heads.num_kv_heads, shape.window
    assert window_plan.begin.tolist() == [
        r * heads * window for r, n in zip(batch.rows.tolist(), [5, 9, 64], strict=True) for _ in range(n)
    ]


@pytest.mark.parametrize("window_options", WINDOW_OPTIONS, ids=str)
def test_every_tile_keeps_its_own_tokens_where_the_reference_does(window_options):
    """Also with several sequences in one tile and several tiles: by plain loops over the pairs."""
    spec = KVSpec("tq4", **window_options)
    for new in ([1] * 18, [5, 64, 64]):
        config = resize_config(CONFIG, num_heads=4)
        stored_tokens = [3] * len(new)
        cache, paging, sequences = fill_cache(config, spec, stored_tokens[:3], seed=1)
        cache = type(cache)(cache.plan, cache.shapes, num_blocks=32)
        paging = type(paging)(32, 128)
        sequences = [paging.add() for _ in new]
        build = programs.decode_program if max(new) == 1 else programs.prefill_program
        shape = window_shape(cache.plan, 0)
        program = build(config, *layer_sides(cache.plan, 0), shape)
        batch = paging.batch(sequences, new)
        rope = torch.zeros(sum(new), 64), torch.zeros(sum(new), 64)
        tiling = inputs.tile(batch, program, rope)
        arguments = inputs.window_arguments(program, tiling, cache, 0)
        k, _ = cache.kv[0].windows
        x = torch.randn(sum(new), 2, 128)
        by_row = tiling.spread(x).bfloat16()
        ours = arguments["k_kept"].clone()
        for tile, count in enumerate(arguments["tile_keeps"].tolist()):
            for i in range(2 * tile * program.rows, 2 * tile * program.rows + count):
                token, place = tile * program.rows + int(arguments["keep_token"][i]), int(arguments["keep_row"][i])
                for head in range(2):
                    ours[place + head * shape.window] = by_row[token, head]
        k.write(x, batch)
        assert torch.equal(ours, k.vectors.view(-1, 128))
        assert arguments["kept_seen"].shape == (tiling.rows * program.attention.group, shape.span)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (KVSpec("k=bf16,v=tq4", tail=8), "beside both K and V, and bf16 or tq4 is stored as it is"),
        (KVSpec("tq4", sink=257), "keep up to 256 sinks"),
        (KVSpec("tq4", tail=2000), "and 1,984 tokens with the tail"),
    ],
)
def test_what_no_program_keeps_is_refused_by_name(spec, message):
    model = small_model(CONFIG, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=message):
        catalog.create("npu", model, spec.plan(CONFIG.num_layers), "sim")


def test_a_layer_without_loss_keeps_nothing():
    plan = KVSpec("tq4", tail=8, layers={1: "bf16"}).plan(2)
    assert NpuExecutor.supports(CONFIG, plan) is None
    assert window_shape(plan, 0).window == 72
    assert window_shape(plan, 1) is None


# -- Layers in the interpreter -----------------------------------------------------------------------------------------------
@with_pypto
def test_a_mask_that_ends_one_key_too_late_beside_a_tail_is_found(monkeypatch):
    """Of 132 tokens the last few see one of their keys twice: as it is packed, and in BF16."""

    def later(self):
        right = mask(self)
        return torch.cat([torch.zeros_like(right[:, :1]), right[:, :-1]], 1)

    mask = AttentionShape.mask
    monkeypatch.setattr(AttentionShape, "mask", later)
    monkeypatch.setattr(candidate_runs, "MOST_CONFIRMED", 0)
    config = resize_config(CONFIG, num_layers=1)
    model, plan = small_model(config, dtype=torch.bfloat16), KVSpec("tq4", tail=124, sink=4).plan(1)
    candidate = catalog.create("npu", model, plan, "sim")
    prompts = [random_tokens(config, 132, 1)]
    report = validate(ReferenceExecutor(model), candidate, model, prompts, 0, plan, modes=("teacher-forced",))
    first = report.first_divergence
    assert (first.phase, first.step, first.layer, first.stage) == ("prefill", 1, 0, "attention_mlp")
    assert first.error > 10 * first.bound
    # No query of the first chunk sees a packed key, nor with that mask.
    assert [row.passed for row in report.rows] == [True, False, False]
