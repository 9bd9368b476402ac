"""Compile a model's NPU programs through every pass of PyPTO to AICore C++."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.qwen3_14b.npu import inputs, programs
from haarkv.models.qwen3_14b.npu.programs import BLOCK, LayerProgram, Phase
from haarkv.models.rope import RopeTable
from haarkv.models.weights import assemble, checkpoint_tensors
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.kernel_support import ELSEWHERE
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.npu.program import Program
from haarkv.tq_ops.npu.sides import FORMAT
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator

PLAN = KVPlan(((FORMAT, FORMAT),))
"""What is compiled unless other formats are asked for."""


@dataclass(frozen=True)
class CompiledProgram:
    """One program, compiled.

    Attributes:
        name: a key of `PROGRAMS`; where the plan needs several programs of a kind, with its first layer: `decode-layer3`.
        seconds: tracing, every pass and code generation.
        sources: path -> C++: kernel functions, one a file, in `kernel_aicore/`; what they include in `kernel_aicpu/`.
        layers: that run it; none for the head.
    """

    name: str
    seconds: float
    sources: dict[str, str]
    layers: tuple[int, ...] = ()

    @property
    def functions(self) -> list[str]:
        return [text for path, text in self.sources.items() if path.startswith(KERNELS)]


def compile_programs(
    config: ModelConfig, names: tuple[str, ...], on_begin: Callable[[str], None], plan: KVPlan = PLAN
) -> Iterator[CompiledProgram]:
    """Compile the programs of some kinds, once for each pair of formats; `on_begin` gets a program's name before that.

    Raises:
        InputError: a config or a format that no program can be built for, or PyPTO is missing.
        SimulatorError: the compiler refused, in its words.
    """
    several = plan_programs(config, names, plan)
    with Simulator() as simulator:
        for name, kind, layers in several:
            program, arguments = smallest_call(kind, config, plan, layers[0] if layers else 0)
            on_begin(name)
            run = simulator.run(program, arguments, Mode.COMPILE)
            yield CompiledProgram(name, run.seconds, run.sources, layers)


def plan_programs(config: ModelConfig, kinds: Sequence[str], plan: KVPlan) -> list[tuple[str, str, tuple[int, ...]]]:
    """Programs that a plan needs: name, kind and layers of each. Refuses as `compile_programs`."""
    if reason := programs.unsupported(config, plan):
        raise InputError(f"nothing to compile: {reason.removesuffix(ELSEWHERE)}")
    sharing: dict[object, list[int]] = {}
    for layer in range(len(plan.layers)):
        sharing.setdefault(programs.plan_program(programs.DECODE, config, plan, layer), []).append(layer)
    entries = []
    for kind in kinds:
        layer_groups = [] if PROGRAMS[kind] is None else list(map(tuple, sharing.values()))
        names = [f"{kind}-layer{layers[0]}" for layers in layer_groups] if len(layer_groups) > 1 else [kind]
        entries += [(name, kind, layers) for name, layers in zip(names, layer_groups or [()], strict=True)]
    return entries


def blank_model(config: ModelConfig, layer: int = 0) -> DecoderModel:
    """A model of one layer, declared as that one, and of zeros."""
    tensors = checkpoint_tensors(one := replace(config, layers=config.layers[layer : layer + 1], max_position_embeddings=1))

    def zeros(name: str) -> torch.Tensor:
        return torch.zeros(tensors[name].shape, dtype=tensors[name].memory_dtype(torch.bfloat16))

    weights = assemble(one, zeros)
    return DecoderModel.from_weights(one, weights)


def layer_call(
    program: LayerProgram,
    model: DecoderModel,
    new: Sequence[int] = (1,),
    past: Sequence[int] = (0,),
    plan: KVPlan = PLAN,
    layer: int = 0,
) -> list[torch.Tensor]:
    """Arguments of a call of a layer, with zeros for all values but lengths and places."""
    config = model.config
    blocks = sum(-(-(a + b) // BLOCK) for a, b in zip(new, past, strict=True))
    cache = PagedKVCache(plan, config.attentions[0].kv_shape, num_blocks=blocks)
    paging = PagedSequences(cache.num_blocks, cache.block_size)
    sequences = [paging.add() for _ in new]
    for sequence, count in zip(sequences, past, strict=True):
        if count:
            paging.batch([sequence], [count])
    batch = paging.batch(sequences, new)
    rope = RopeTable(config.common.attention.rope, int(batch.positions.max()) + 1)
    tiling = inputs.tile(cache.kv[layer].place(batch), program, rope.at(batch.positions))
    hidden = tiling.spread(torch.zeros(sum(new), config.hidden_size, dtype=torch.bfloat16))
    constants = {**inputs.layer_constants(model, 0), **inputs.mask_arguments(program)}
    return inputs.layer_call(program, constants, hidden, tiling, cache, layer)[0]


PROGRAMS: Mapping[str, Phase | None] = {"decode": programs.DECODE, "prefill": programs.PREFILL, "head": None}
"""Kinds of programs: a layer's have a phase."""


def smallest_call(kind: str, config: ModelConfig, plan: KVPlan = PLAN, layer: int = 0) -> tuple[Program, list[torch.Tensor]]:
    """A program of a kind, and the arguments of its smallest call; `layer` is one of the plan's."""
    model, phase = blank_model(config, layer), PROGRAMS[kind]
    if phase is not None:
        program = programs.plan_program(phase, config, plan, layer)
        return program, layer_call(program, model, plan=plan, layer=layer)
    head = programs.head_program(config)
    hidden = torch.zeros(1, config.hidden_size, dtype=torch.bfloat16)
    return head, inputs.head_call(head, inputs.head_constants(model, head)[0], hidden)[0]


KERNELS = "kernel_aicore/"
"""Where the sources of a program keep its kernel functions; they include a header from `kernel_aicpu/`."""


def write_sources(folder: Path, programs: Mapping[str, Mapping[str, str]]) -> None:
    """Write the sources of some programs into an empty folder; the last comment of a kernel function is its compile line."""
    for name, sources in programs.items():
        for path, text in sources.items():
            (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / path).write_text(text, encoding="utf-8")
