"""A layer of `tiny` about to run as an NPU program, with what it should give."""

import torch
from small_models import new_cache

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import load_model
from haarkv.models.qwen3_14b.npu import inputs
from haarkv.tq_ops.kv.batch import PagedSequences

LAYER = 1


def layer_call(program, new, stored):
    """A layer of `tiny` about to run: arguments, goldens by argument index, and which rows of the output are padding."""
    model = load_model("tiny", "bfloat16")
    executor = ReferenceExecutor(model)
    cache = new_cache(model.config, block_size=128, num_blocks=12)
    paging = PagedSequences(12, 128, torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist())
    sequences = [paging.add() for _ in new]
    generator = torch.Generator().manual_seed(2)

    def run(counts):
        batch = paging.batch(sequences, counts)
        hidden = torch.randn(sum(counts), model.config.hidden_size, generator=generator).bfloat16()
        return batch, hidden

    batch, hidden = run(stored)
    executor.layers(hidden, range(LAYER, LAYER + 1), batch, cache)
    batch, hidden = run(new)
    tiling = inputs.tile(batch, program, model.rope.at(batch.positions))
    constants = {**inputs.layer_constants(model, LAYER), "mask": program.attention.mask()}
    arguments, _ = inputs.layer_call(program, constants, tiling.spread(hidden), tiling, cache, LAYER)
    # The program gets copies; the reference then writes the cache itself.
    arguments = [a.clone() for a in arguments]
    expected = executor.layers(hidden, range(LAYER, LAYER + 1), batch, cache)
    index = {a.name: i for i, a in enumerate(program.arguments)}
    goldens = {index[name]: tensor for name, tensor in inputs.cache_arguments(cache, LAYER).items()}
    return arguments, goldens, index["out"], tiling, expected
