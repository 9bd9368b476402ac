"""The NPU executor: whole layers as PyPTO programs, on an Ascend NPU or in PyPTO's own interpreter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.models.qwen3_14b.npu import inputs, programs
from haarkv.models.qwen3_14b.npu.programs import LayerProgram
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.kv.batch import Batch, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import WINDOW_ROOM
from haarkv.tq_ops.npu.device import Runner, open_runner
from haarkv.tq_ops.npu.program import AttentionShape


class NpuExecutor(Executor):
    """Runs a BF16 model of dense layers on `sim`, `npu:N` or the first NPU: one program a layer, one for the head."""

    name = "npu"
    decode_step = programs.DECODE.step

    def __init__(self, model: DecoderModel, device: str | None = None) -> None:
        self._runner: Runner = open_runner(device)
        self.config = model.config
        self.device = self._runner.device
        self.description = self._runner.description
        self.simulated = self._runner.simulated
        with self._runner.refusals():
            self._model = model.to(self.device)
        self._head = programs.head_program(model.config, self._runner.most_vocab)
        self._layers = [self._constant(inputs.layer_constants(self._model, i)) for i in range(model.config.num_layers)]
        self._head_slices = list(map(self._constant, inputs.head_constants(self._model, self._head)))
        self._masks: dict[AttentionShape, dict[str, Tensor]] = {}

    @property
    def compiled(self) -> dict[str, float]:
        return self._runner.compiled

    @staticmethod
    def supports(config: ModelConfig, plan: KVPlan) -> str | None:
        return programs.unsupported(config, plan)

    def compile_ahead(self, plan: KVPlan, on_program: Callable[[str], object]) -> None:
        """Compile what a device would compile on its first calls, by a small prefill and a decode step on another cache."""
        self._runner.on_program = on_program
        if not self._runner.keeps_programs:
            return
        cache = PagedKVCache(plan, self.config.kv_shapes, num_blocks=1, num_rows=1, room=WINDOW_ROOM, device=self.device)
        paging = PagedSequences(1, cache.block_size, num_rows=1)
        sequence = paging.add()
        for tokens in (2, 1):
            batch = paging.batch([sequence], [tokens]).to(self.device)
            self.head(self.forward(torch.zeros(tokens, dtype=torch.int64, device=self.device), batch, cache))

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: Batch, cache: PagedKVCache) -> Tensor:
        with self._runner.refusals():
            return self.layers(self._model.embed(token_ids), range(self.config.num_layers), batch, cache)

    @torch.inference_mode()
    def head(self, hidden: Tensor) -> Tensor:
        slices = []
        with self._runner.refusals():
            for constants in self._head_slices:
                arguments, padded = inputs.head_call(self._head, constants, hidden)
                self._runner.call(self._head, arguments)
                slices.append(padded[: hidden.shape[0]])
            logits = torch.cat(slices, dim=1)[:, : self.config.vocab_size]
            if not torch.isfinite(logits).all():
                raise NonFiniteError("logits are not finite on npu; --executor reference on the same prompt names the tensor")
        return logits

    @torch.inference_mode()
    def layers(self, hidden: Tensor, span: range, batch: Batch, cache: PagedKVCache) -> Tensor:
        if cache.block_size != programs.BLOCK:
            raise InputError(f"executor npu needs a cache of {programs.BLOCK}-token blocks, not {cache.block_size}")
        cache.require_room(batch)
        one_each = batch.query_start_loc.numel() - 1 == hidden.shape[0]
        phase, chunk = (programs.DECODE, cache.room) if one_each else (programs.PREFILL, cache.chunk)
        ropes, tilings = self._model.rope_at(batch.positions), {}
        state: Tensor | None = None
        for index in span:
            mixer = self.config.layers[index].attention
            program = programs.plan_program(phase, self.config, cache.plan, index, chunk=chunk)
            # Layers differ in their angles and in where their tokens lie, and agree on which row is whose.
            tiling_key = mixer.rope, cache.kv[index].ring, program.attention.step_tokens
            if tiling_key not in tilings:
                tilings[tiling_key] = inputs.tile(cache.kv[index].place(batch), program, ropes[mixer.rope])
            tiling = tilings[tiling_key]
            with cache.open(index, batch, always=not one_each):
                state = self._layer(program, index, tiling.spread(hidden) if state is None else state, tiling, cache)
        return hidden if state is None else state[tiling.row]

    def _constant(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._runner.constant(tensor) for name, tensor in tensors.items()}

    def _layer(self, program: LayerProgram, index: int, hidden: Tensor, tiling: inputs.Tiling, cache: PagedKVCache) -> Tensor:
        if program.attention not in self._masks:
            self._masks[program.attention] = self._constant(inputs.mask_arguments(program, self.device))
        constants = {**self._layers[index], **self._masks[program.attention]}
        self._constant(program.k.domain_tensors(cache.plan.k(index), index, self.device))
        arguments, out = inputs.layer_call(program, constants, hidden, tiling, cache, index)
        self._runner.call(program, arguments)
        return out
