"""A layer of an NPU program about to run, and programs with a fault that the checks of emitted text and its execution find."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from npu_layers import faint, telling, with_leftovers
from npu_programs import StoreProgram
from planted_programs import FaultyProgram
from small_models import new_cache

from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model
from haarkv.models.qwen3_14b.npu import inputs
from haarkv.tq_ops.kv.batch import PagedSequences

LAYER = 1
_CORRECT = "high - pypto.where(pypto.ge(high, 8.0), 16.0, 0.0)"
_FAULTY = "pypto.where(pypto.ge(high, 8.0), high - 16.0, high)"


_BARRIER = ", submit_before_loop=True"


def with_positions(model, positions):
    """The model, whose rotary tables reach at least this number of positions."""
    config = replace(model.config, max_position_embeddings=max(positions, model.config.max_position_embeddings))
    return DecoderModel.from_weights(config, model.weights)


def layer_call(program, new, lengths, blocks=12, model=None, spec=None):
    """A layer about to run: arguments, goldens by argument index, and which rows of the output are padding.

    Args:
        blocks: of the cache; tokens may stand behind the positions that the model was made for.
        model: of bfloat16; `tiny` if None.
        spec: of the cache; the fixed formats of the program's sides if None.
    """
    model = telling(with_positions(model or load_model("tiny", "bfloat16"), blocks * 128))
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

    at_once = cache.most_new_tokens or max(max(lengths), 1)
    for begin in range(0, max(lengths), at_once):
        for sequence, length in zip(sequences, lengths, strict=True):
            if begin < length:
                batch, hidden = run([min(at_once, length - begin)], [sequence])
                executor.layers(hidden, range(LAYER, LAYER + 1), batch, cache)
    batch, hidden = run(new)
    rope = model.ropes[model.config.layers[LAYER].attention.rope].at(batch.positions)
    tiling = inputs.tile(cache.kv[LAYER].place(batch), program, rope)
    constants = {**inputs.layer_constants(model, LAYER), **inputs.mask_arguments(program)}
    arguments, _ = inputs.layer_call(program, constants, tiling.spread(hidden), tiling, cache, LAYER)
    # The program gets copies; the reference then writes the cache itself.
    arguments = [a.clone() for a in arguments]
    expected = executor.layers(hidden, range(LAYER, LAYER + 1), batch, cache)
    index = {a.name: i for i, a in enumerate(program.arguments)}
    output_names = {a.name for a in program.arguments if a.output}
    memory = inputs.cache_arguments(cache, LAYER) | inputs.window_arguments(program, tiling, cache, LAYER)
    goldens = {index[name]: tensor for name, tensor in memory.items() if name in output_names}
    return arguments, goldens, index["out"], tiling, expected


@dataclass(frozen=True)
class StridedWhere(StoreProgram):
    """The store program with a `where` that takes views into a wider tile: the device's headers read them with its own width.

    PyPTO's interpreter finds it right. To be compiled in a simulator of its own, which is then closed: the fault stays in the
    worker process.
    """

    name: str = "strided_where"

    def build(self, **options):
        from haarkv.tq_ops.npu.kernels import tq4

        text = Path(tq4.__file__).read_text(encoding="utf-8")
        assert text.count(_CORRECT) == 1, "the line to spoil is no longer there"
        faulty = {"__name__": tq4.__name__}
        exec(compile(text.replace(_CORRECT, _FAULTY), tq4.__file__, "exec"), faulty)
        tq4.quantize = faulty["quantize"]
        return super().build(**options)


def without_barrier(program):
    """A layer without the barrier between APPEND and UNIT: of a cache's many writers PyPTO's tables remember one."""
    return FaultyProgram.with_fault(program, _BARRIER, "")
