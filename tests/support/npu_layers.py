"""A layer of `tiny` about to run as an NPU program, with what it should give."""

from dataclasses import replace

import torch
from small_models import new_cache

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model
from haarkv.models.qwen3_14b.npu import inputs
from haarkv.tq_ops.kv.batch import PagedSequences

LAYER = 1


def stretched(model, positions):
    """The model with rotary tables for at least so many positions."""
    config = replace(model.config, max_position_embeddings=max(positions, model.config.max_position_embeddings))
    return DecoderModel.of(config, model.weights)


def layer_call(program, new, stored, blocks=12, model=None, spec=None):
    """A layer about to run: arguments, goldens by argument index, and which rows of the output are padding.

    Args:
        blocks: of the cache; tokens may stand behind the positions that the model was made for.
        model: of bfloat16; `tiny` if None.
        spec: of the cache; the fixed formats of the program's sides if None.
    """
    model = stretched(model or load_model("tiny", "bfloat16"), blocks * 128)
    executor = ReferenceExecutor(model)
    spec = spec or f"k={program.k.name},v={program.v.name}"
    cache = new_cache(model.config, spec, block_size=128, num_blocks=blocks)
    paging = PagedSequences(blocks, 128, torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist())
    sequences = [paging.add() for _ in new]
    generator = torch.Generator().manual_seed(2)

    def run(counts):
        batch = paging.batch(sequences, counts)
        hidden = torch.randn(sum(counts), model.config.hidden_size, generator=generator).bfloat16()
        return batch, hidden

    batch, hidden = run(stored)
    executor.layers(hidden, range(LAYER, LAYER + 1), batch, cache)
    batch, hidden = run(new)
    tiling = inputs.tile(batch, program, model.ropes[model.config.common.attention.rope].at(batch.positions))
    constants = {**inputs.layer_constants(model, LAYER), "mask": program.attention.mask()}
    arguments, _ = inputs.layer_call(program, constants, tiling.spread(hidden), tiling, cache, LAYER)
    # The program gets copies; the reference then writes the cache itself.
    arguments = [a.clone() for a in arguments]
    expected = executor.layers(hidden, range(LAYER, LAYER + 1), batch, cache)
    index = {a.name: i for i, a in enumerate(program.arguments)}
    written = {a.name for a in program.arguments if a.output}
    goldens = {index[name]: tensor for name, tensor in inputs.cache_arguments(cache, LAYER).items() if name in written}
    return arguments, goldens, index["out"], tiling, expected
