"""Compile the NPU programs of a model ahead: through every pass of PyPTO, down to the AICore C++."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.qwen3_14b.npu import inputs, programs
from haarkv.models.qwen3_14b.npu.programs import BLOCK, LayerProgram
from haarkv.models.rope import RopeTable
from haarkv.models.weights import assemble, checkpoint_tensors
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.reads import ELSEWHERE
from haarkv.tq_ops.npu.cpp_folder import KERNELS
from haarkv.tq_ops.npu.kept import kept_shape
from haarkv.tq_ops.npu.program import Program
from haarkv.tq_ops.npu.sides import FORMAT, sides_of
from haarkv.tq_ops.npu.sim.simulator import Mode, Simulator

_HEAD = "head"
PLAN = KVPlan.uniform(FORMAT, FORMAT, 1)
"""What is compiled unless other formats are asked for."""


@dataclass(frozen=True)
class Compiled:
    """One program, compiled.

    Attributes:
        name: of `PROGRAMS`; where the plan needs several programs of a kind, such as `decode-layer3`, the first layer of one.
        seconds: tracing, every pass and code generation.
        sources: path -> C++: kernel functions, one a file, in `kernel_aicore/`; what they include in `kernel_aicpu/`.
        layers: that run it; none of the head.
    """

    name: str
    seconds: float
    sources: dict[str, str]
    layers: tuple[int, ...] = ()

    @property
    def functions(self) -> list[str]:
        """The text of each kernel function."""
        return [text for path, text in self.sources.items() if path.startswith(KERNELS)]


def compile_programs(
    config: ModelConfig, names: tuple[str, ...], on_begin: Callable[[str], None], plan: KVPlan = PLAN
) -> Iterator[Compiled]:
    """Compile programs one after the other.

    Args:
        names: kinds of `PROGRAMS`.
        on_begin: called with a program's name before its compilation.
        plan: how the layers store K and V; each pair of formats is compiled once.
    Raises:
        InputError: a config or a format that no program can be built for, or PyPTO is missing.
        SimulatorError: the compiler refused, in its words.
    """
    several = wanted(config, names, plan)
    with Simulator() as simulator:
        for name, kind, layers in several:
            model = blank_model(config, layers[0] if layers else 0)
            program, arguments = PROGRAMS[kind](model, plan, layers[0] if layers else 0)
            on_begin(name)
            run = simulator.run(program, arguments, Mode.COMPILE)
            yield Compiled(name, run.seconds, run.sources, layers)


def wanted(config: ModelConfig, kinds: Sequence[str], plan: KVPlan) -> list[tuple[str, str, tuple[int, ...]]]:
    """Programs that a plan needs: name, kind and layers of each.

    Raises:
        InputError: a config or a format that no program can be built for.
    """
    if reason := programs.unsupported(config, plan):
        raise InputError(f"nothing to compile: {reason.removesuffix(ELSEWHERE)}")
    sharing: dict[object, list[int]] = {}
    for layer in range(len(plan.layers)):
        sharing.setdefault(_built(programs.decode_program, config, plan, layer, layer), []).append(layer)
    found = []
    for kind in kinds:
        of_layers = [] if kind == _HEAD else list(map(tuple, sharing.values()))
        names = [f"{kind}-layer{layers[0]}" for layers in of_layers] if len(of_layers) > 1 else [kind]
        found += [(name, kind, layers) for name, layers in zip(names, of_layers or [()], strict=True)]
    return found


def blank_model(config: ModelConfig, layer: int = 0) -> DecoderModel:
    """A model of one layer, declared as that one, and of zeros: a compilation depends on shapes alone."""
    tensors = checkpoint_tensors(one := replace(config, layers=config.layers[layer : layer + 1], max_position_embeddings=1))

    def zeros(name: str) -> torch.Tensor:
        return torch.zeros(tensors[name].shape, dtype=tensors[name].kept_as(torch.bfloat16))

    weights = assemble(one, zeros)
    return DecoderModel.of(one, weights)


def layer_call(
    program: LayerProgram,
    model: DecoderModel,
    new: Sequence[int] = (1,),
    stored: Sequence[int] = (0,),
    plan: KVPlan = PLAN,
    layer: int = 0,
) -> list[torch.Tensor]:
    """Arguments of a layer without values, as order and cost look at sizes, lengths and places alone."""
    config = model.config
    blocks = sum(-(-(a + b) // BLOCK) for a, b in zip(new, stored, strict=True))
    cache = PagedKVCache(plan, config.attentions[0].kv_shape, num_blocks=blocks)
    paging = PagedSequences(cache.num_blocks, cache.block_size)
    sequences = [paging.add() for _ in new]
    for sequence, count in zip(sequences, stored, strict=True):
        if count:
            paging.batch([sequence], [count])
    batch = paging.batch(sequences, new)
    rope = RopeTable(config.common.attention.rope, int(batch.positions.max()) + 1)
    tiling = inputs.tile(cache.placed(layer, batch), program, rope.at(batch.positions))
    hidden = tiling.spread(torch.zeros(sum(new), config.hidden_size, dtype=torch.bfloat16))
    constants = {**inputs.layer_constants(model, 0), **inputs.mask_arguments(program)}
    return inputs.layer_call(program, constants, hidden, tiling, cache, layer)[0]


def _built(
    build: Callable[..., LayerProgram], config: ModelConfig, plan: KVPlan, stored_as: int, declared_as: int
) -> LayerProgram:
    """A layer's program, by its number in the plan and in the config."""
    mixer = config.layers[declared_as].attention
    kept = kept_shape(plan, stored_as, window=mixer.window)
    return build(config, *sides_of(plan, stored_as, mixer.head_dim), kept, layer=declared_as)


def _layer(
    build: Callable[..., LayerProgram], model: DecoderModel, plan: KVPlan = PLAN, layer: int = 0
) -> tuple[Program, list[torch.Tensor]]:
    program = _built(build, model.config, plan, layer, 0)
    return program, layer_call(program, model, plan=plan, layer=layer)


def _head(model: DecoderModel, _: KVPlan = PLAN, _layer: int = 0) -> tuple[Program, list[torch.Tensor]]:
    program = programs.head_program(model.config)
    hidden = torch.zeros(1, model.config.hidden_size, dtype=torch.bfloat16)
    return program, inputs.head_call(program, inputs.head_constants(model, program)[0], hidden)[0]


PROGRAMS: dict[str, Callable[..., tuple[Program, list[torch.Tensor]]]] = {
    "decode": partial(_layer, programs.decode_program),
    "prefill": partial(_layer, programs.prefill_program),
    _HEAD: _head,
}
"""Kind -> a program and the arguments of its smallest call, of a model, a plan and one of its layers."""
