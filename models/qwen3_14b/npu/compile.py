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
from haarkv.tq_ops.npu.emitted.checks import Report, check
from haarkv.tq_ops.npu.program import Program
from haarkv.tq_ops.npu.reads import FORMAT
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator


@dataclass(frozen=True)
class Compiled:
    """One program, compiled.

    Attributes:
        seconds: tracing, every pass and code generation.
        sources: path -> C++: kernel functions, one a file, in `kernel_aicore/`; what they include in `kernel_aicpu/`.
        report: what the checks of the text found.
    """

    name: str
    seconds: float
    sources: dict[str, str]
    report: Report


def compile_programs(config: DecoderConfig, names: tuple[str, ...], on_begin: Callable[[str], None]) -> Iterator[Compiled]:
    """Compile programs one after the other, and check the C++ they become.

    Args:
        names: of `PROGRAMS`.
        on_begin: called with a program's name before its compilation.
    Raises:
        InputError: a config that no program can be built for, or PyPTO is missing.
        SimulatorError: the compiler refused, in its words.
    """
    if reason := programs.unsupported(config):
        raise InputError(f"nothing to compile: {reason}")
    model = _blank(config)
    with Simulator() as simulator:
        for name in names:
            program, arguments = PROGRAMS[name](model)
            on_begin(name)
            run = simulator.run(program, arguments, Mode.COMPILE)
            yield Compiled(name, run.seconds, run.sources, check(name, run.sources))


def _blank(config: DecoderConfig) -> DecoderModel:
    """A model of one layer and of zeros: a compilation depends on shapes alone, and all layers share it."""
    shapes = checkpoint_shapes(one := replace(config, num_layers=1, max_position_embeddings=1))
    weights = assemble(one, lambda name: torch.zeros(shapes[name], dtype=torch.bfloat16))
    return DecoderModel(one, weights, RopeTable(one))


def _layer_call(program: LayerProgram, model: DecoderModel) -> list[torch.Tensor]:
    """Arguments of a layer for one token in an empty cache."""
    config = model.config
    heads, dim = config.num_kv_heads, config.head_dim
    cache = PagedKVCache(KVPlan.uniform(FORMAT, FORMAT, 1), num_kv_heads=heads, head_dim=dim, num_blocks=1)
    paging = PagedSequences(cache.num_blocks, cache.block_size)
    batch = paging.batch([paging.add()], [1])
    tiling = inputs.tile(batch, program, model.rope.at(batch.positions))
    hidden = tiling.spread(torch.zeros(1, config.hidden_size, dtype=torch.bfloat16))
    constants = {**inputs.layer_constants(model, 0), "mask": program.attention.mask()}
    return inputs.layer_call(program, constants, hidden, tiling, cache, 0)[0]


def _decode(model: DecoderModel) -> tuple[Program, list[torch.Tensor]]:
    program = programs.decode_program(model.config)
    return program, _layer_call(program, model)


def _prefill(model: DecoderModel) -> tuple[Program, list[torch.Tensor]]:
    program = programs.prefill_program(model.config)
    return program, _layer_call(program, model)


def _head(model: DecoderModel) -> tuple[Program, list[torch.Tensor]]:
    program = programs.head_program(model.config)
    hidden = torch.zeros(1, model.config.hidden_size, dtype=torch.bfloat16)
    return program, inputs.head_call(program, inputs.head_constants(model, program)[0], hidden)[0]


PROGRAMS: dict[str, Callable[[DecoderModel], tuple[Program, list[torch.Tensor]]]] = {
    "decode": _decode,
    "prefill": _prefill,
    "head": _head,
}
"""A program and the arguments of its smallest call, by name."""
