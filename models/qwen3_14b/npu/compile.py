"""Compile the NPU programs of a model ahead: through every pass of PyPTO, down to the AICore C++."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from haarkv.models.base import DecoderConfig, DecoderModel
from haarkv.models.qwen3_14b.npu import inputs, programs
from haarkv.models.qwen3_14b.npu.programs import LayerProgram
from haarkv.models.rope import RopeTable
from haarkv.models.weights import assemble, checkpoint_shapes
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.reads import unsupported
from haarkv.tq_ops.npu.program import Program
from haarkv.tq_ops.npu.reads import FORMAT, READS
from haarkv.tq_ops.npu.sides import sides_of
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator

PLAN = KVPlan.uniform(FORMAT, FORMAT, 1)
"""What is compiled unless other formats are asked for."""


@dataclass(frozen=True)
class Compiled:
    """One program, compiled.

    Attributes:
        seconds: tracing, every pass and code generation.
        sources: file name -> AICore C++, one file a kernel function.
    """

    name: str
    seconds: float
    sources: dict[str, str]

    @property
    def lines(self) -> int:
        """Of all sources."""
        return sum(text.count("\n") for text in self.sources.values())


def compile_programs(
    config: DecoderConfig, names: tuple[str, ...], on_begin: Callable[[str], None], plan: KVPlan = PLAN
) -> Iterator[Compiled]:
    """Compile programs one after the other.

    Args:
        names: of `PROGRAMS`.
        on_begin: called with a program's name before its compilation.
        plan: how the layer stores K and V.
    Raises:
        InputError: a config or a format that no program can be built for, or PyPTO is missing.
        SimulatorError: the compiler refused, in its words.
    """
    if reason := unsupported(READS, plan, config.head_dim) or programs.unsupported(config):
        raise InputError(f"nothing to compile: {reason}")
    model = _blank(config)
    with Simulator() as simulator:
        for name in names:
            program, arguments = PROGRAMS[name](model, plan)
            on_begin(name)
            run = simulator.run(program, arguments, Mode.COMPILE)
            yield Compiled(name, run.seconds, run.sources)


def _blank(config: DecoderConfig) -> DecoderModel:
    """A model of one layer and of zeros: a compilation depends on shapes alone, and all layers share it."""
    shapes = checkpoint_shapes(one := replace(config, num_layers=1, max_position_embeddings=1))
    weights = assemble(one, lambda name: torch.zeros(shapes[name], dtype=torch.bfloat16))
    return DecoderModel(one, weights, RopeTable(one))


def _layer_call(program: LayerProgram, model: DecoderModel, plan: KVPlan) -> list[torch.Tensor]:
    """Arguments of a layer for one token in an empty cache."""
    config = model.config
    heads, dim = config.num_kv_heads, config.head_dim
    cache = PagedKVCache(plan, num_kv_heads=heads, head_dim=dim, num_blocks=1)
    paging = PagedSequences(cache.num_blocks, cache.block_size)
    batch = paging.batch([paging.add()], [1])
    tiling = inputs.tile(batch, program, model.rope.at(batch.positions))
    hidden = tiling.spread(torch.zeros(1, config.hidden_size, dtype=torch.bfloat16))
    constants = {**inputs.layer_constants(model, 0), "mask": program.attention.mask()}
    return inputs.layer_call(program, constants, hidden, tiling, cache, 0)[0]


def _decode(model: DecoderModel, plan: KVPlan = PLAN) -> tuple[Program, list[torch.Tensor]]:
    program = programs.decode_program(model.config, *sides_of(plan, 0))
    return program, _layer_call(program, model, plan)


def _prefill(model: DecoderModel, plan: KVPlan = PLAN) -> tuple[Program, list[torch.Tensor]]:
    program = programs.prefill_program(model.config, *sides_of(plan, 0))
    return program, _layer_call(program, model, plan)


def _head(model: DecoderModel, _: KVPlan = PLAN) -> tuple[Program, list[torch.Tensor]]:
    program = programs.head_program(model.config)
    hidden = torch.zeros(1, model.config.hidden_size, dtype=torch.bfloat16)
    return program, inputs.head_call(program, inputs.head_constants(model, program)[0], hidden)[0]


PROGRAMS: dict[str, Callable[..., tuple[Program, list[torch.Tensor]]]] = {
    "decode": _decode,
    "prefill": _prefill,
    "head": _head,
}
"""Name -> a program and the arguments of its smallest call, of a model and of a plan of one layer."""
