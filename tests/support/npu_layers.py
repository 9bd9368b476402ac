"""A layer of `tiny` about to run as an NPU program, with what it should give."""

from dataclasses import replace

import torch
from small_models import cache_tensors, new_cache

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model
from haarkv.models.qwen3_14b.npu import inputs
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.validation.ops.caches import windows_of

LAYER = 1


def telling(model):
    """The model with MLPs that add little, so that what attention adds to a `faint` hidden state is most of the result."""
    layers = tuple(
        layer.changed(lambda field, x: x * 2.0**-5 if field == "down_proj" else x) for layer in model.weights.layers
    )
    return replace(model, weights=replace(model.weights, layers=layers))


def faint(tokens, hidden_size, generator):
    """Hidden states [tokens, hidden] BF16 so short that what a layer adds to them is all that can be seen of them.

    A layer norms what it is given, so what it adds is as long as ever: 20 to 200 times as long as these.
    """
    return (torch.randn(tokens, hidden_size, generator=generator) * 2.0**-7).bfloat16()


def worst_token(ours, theirs):
    """The largest error of a token's state [T, hidden], relative to that one's length; NaN if any is NaN."""
    ours, theirs = ours.float(), theirs.float()
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max())


def with_leftovers(cache, seed=4):
    """The cache, in every slot what other sequences left there, as long as keys and values are: not one of it may be seen."""
    generator = torch.Generator().manual_seed(seed)
    for layer, _, _, tensor in cache_tensors(cache):
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) if tensor.dim() > 3 else 12.0)
        else:
            levels = 16 if tensor.shape[-1] == cache.shape(layer).head_dim else 256
            tensor.copy_(torch.randint(0, levels, tensor.shape, generator=generator))
    for tensor in windows_of(cache):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


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
    model = telling(stretched(model or load_model("tiny", "bfloat16"), blocks * 128))
    executor = ReferenceExecutor(model)
    spec = spec or f"k={program.k.name},v={program.v.name}"
    cache = with_leftovers(new_cache(model.config, spec, block_size=128, num_blocks=blocks))
    paging = PagedSequences(blocks, 128, torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist())
    sequences = [paging.add() for _ in new]
    generator = torch.Generator().manual_seed(2)

    def run(counts, sequences=sequences):
        batch = paging.batch(sequences, counts)
        hidden = faint(sum(counts), model.config.hidden_size, generator)
        return batch, hidden

    at_once = cache.most_new_tokens or max(max(stored), 1)
    for begin in range(0, max(stored), at_once):
        for sequence, length in zip(sequences, stored, strict=True):
            if begin < length:
                batch, hidden = run([min(at_once, length - begin)], [sequence])
                executor.layers(hidden, range(LAYER, LAYER + 1), batch, cache)
    batch, hidden = run(new)
    rope = model.ropes[model.config.layers[LAYER].attention.rope].at(batch.positions)
    tiling = inputs.tile(cache.placed(LAYER, batch), program, rope)
    constants = {**inputs.layer_constants(model, LAYER), **inputs.mask_arguments(program)}
    arguments, _ = inputs.layer_call(program, constants, tiling.spread(hidden), tiling, cache, LAYER)
    # The program gets copies; the reference then writes the cache itself.
    arguments = [a.clone() for a in arguments]
    expected = executor.layers(hidden, range(LAYER, LAYER + 1), batch, cache)
    index = {a.name: i for i, a in enumerate(program.arguments)}
    written = {a.name for a in program.arguments if a.output}
    memory = inputs.cache_arguments(cache, LAYER) | inputs.kept_arguments(program, tiling, cache, LAYER)
    goldens = {index[name]: tensor for name, tensor in memory.items() if name in written}
    return arguments, goldens, index["out"], tiling, expected
