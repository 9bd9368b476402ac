"""The rungs that run an executor against the host: layers in one mode at a time, greedy text."""

from __future__ import annotations

import torch
from torch import Tensor

from haarkv.engine.session import Session
from haarkv.executors.base import Executor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import BLOCK_SIZE, blocks_for
from haarkv.validation.bounds import NPU_LAYER_ADDED
from haarkv.validation.bringup.ladder import RungFinding
from haarkv.validation.bringup.workbench import Workbench
from haarkv.validation.fidelity.greedy_diff import greedy_diff
from haarkv.validation.layers.report import LayerRow, Mode
from haarkv.validation.layers.runner import validate


# -- Layers ------------------------------------------------------------------------------------------------------------
def validate_formats(bench: Workbench, model: DecoderModel, mode: Mode) -> RungFinding:
    """Each format's validation in one mode, up to the first that fails."""
    # Cores that race give another result now and then.
    repeats = bench.repeats if model is bench.first_layer and mode == "teacher-forced" else 0
    num_rows = 0
    for kv, plan in bench.plans_of(model).items():

        def on_row(row: LayerRow, kv: str = kv) -> None:
            bench.tell(f"{kv}, {row.phase} {row.step}, layer {row.layer}")

        executor, tokens = bench.executor(model), [bench.tokenizer.encode(prompt) for prompt in bench.prompts]
        report = validate(ReferenceExecutor(model), executor, model, tokens, bench.steps, plan, on_row, [mode], repeats)
        num_rows += len(report.rows)
        if not report.passed:
            first = report.first_divergence
            where = first.where if first else "the whole forward"
            message = f"{where} in {first.phase} {first.step}: {first.detail}" if first else "not every row was compared"
            return RungFinding(False, f"{kv}: {message}", num_rows, "rows", f"{kv}, {where}")
    return RungFinding(True, f"{', '.join(bench.plans)}: {num_rows} rows within their bounds", num_rows, "rows")


# Tokens of the longest sequence behind a whole step of keys, and of a short one beside it.
_BEYOND, _FEW = 53, 17
# Times which K and V behind the first step are as long: the maximum grows there, and what is read there decides. And of tokens
# behind the step's own, which no query may see: one that is seen is all that a head sees.
_LOUDER, _LOUDEST = (2.0, 8.0), (16.0, 64.0)
# So short that what a layer adds to it is nearly all of the sum; a layer norms what it is given.
_FAINT = 2.0**-7


def long_decode(bench: Workbench) -> RungFinding:
    """One decode step of the first layer behind random K and V that take a second step of keys."""
    model = bench.first_layer
    step = bench.executor(model).decode_step
    if step is None:
        return RungFinding(None, "its decode takes no steps of keys")
    if step + _BEYOND > bench.longest:
        return RungFinding(
            None, f"this model has room for {bench.longest:,} tokens, and a step takes {step:,}", lacking="room"
        )
    hidden = (torch.randn(2, model.config.hidden_size, generator=torch.Generator().manual_seed(2)) * _FAINT).to(model.dtype)
    worst = 0.0
    for kv, plan in bench.plans_of(model).items():
        bench.tell(f"{kv}, decode behind {step + _BEYOND:,} tokens")
        sides = ReferenceExecutor(model), bench.executor(model)
        theirs, ours = (_decode_one_token(executor, model, plan, hidden, step) for executor in sides)
        error = float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).nan_to_num(torch.inf).max())
        if error > NPU_LAYER_ADDED:
            message = f"{kv}: what layer 0 adds is off by {error:.1e}, bound {NPU_LAYER_ADDED:.0e}"
            return RungFinding(False, message, ours.numel(), where=f"{kv}, layer 0, attention")
        worst = max(worst, error)
    bound_text = f"within {worst:.1e} (bound {NPU_LAYER_ADDED:.0e})"
    message = f"{', '.join(bench.plans)}: behind {step + _BEYOND:,} and {_FEW} tokens, {bound_text}"
    return RungFinding(True, message, len(bench.plans) * hidden.numel())


def _decode_one_token(executor: Executor, model: DecoderModel, plan: KVPlan, hidden: Tensor, step: int) -> Tensor:
    """Hidden states after the first layer for one token of each of two sequences, FP32 on the host."""
    blocks = blocks_for(step + _BEYOND + 1) + 1
    host, ours = (
        PagedKVCache(plan, model.config.kv_shapes, num_blocks=blocks, device=device) for device in ("cpu", executor.device)
    )
    paging, prefix_paging = PagedSequences(blocks, BLOCK_SIZE), PagedSequences(blocks, BLOCK_SIZE)
    generator, heads = torch.Generator().manual_seed(0), model.config.heads
    sequences = [(paging.add(), prefix_paging.add())[0] for _ in range(2)]
    for sequence, length in zip(sequences, (step + _BEYOND, _FEW), strict=True):
        paging.batch([sequence], [length])
        for begin in range(0, more := length + _FEW, piece := host.most_new_tokens or more):
            batch = prefix_paging.batch([sequence], [min(piece, more - begin)])
            sizes = len(batch.positions), heads.num_kv_heads, heads.head_dim
            at = batch.positions.view(-1, 1, 1)
            k, v = (
                torch.randn(sizes, generator=generator) * torch.where(at > length, most, torch.where(at >= step, by, 1.0))
                for by, most in zip(_LOUDER, _LOUDEST, strict=True)
            )
            host.view(0, batch).write(k, v)
    for theirs, host_tensor in zip(_tensors(ours), _tensors(host), strict=True):
        theirs.copy_(host_tensor)
    batch = paging.batch(sequences, [1, 1]).to(executor.device)
    return executor.layers(hidden.to(executor.device), range(1), batch, ours).float().cpu()


def _tensors(cache: PagedKVCache) -> list[Tensor]:
    windows = [window.vectors for window in cache.kv[0].windows if window]
    return [*cache.kv[0].k.fields.values(), *cache.kv[0].v.fields.values(), *windows]


# -- Greedy text -------------------------------------------------------------------------------------------------------
_SHOWN_CHARACTERS = 100


def greedy_text(bench: Workbench) -> RungFinding:
    """The executor's text in each format against the reference's."""
    dtype = str(bench.model.dtype).removeprefix("torch.")
    num_positions, facts = 0, {}
    for kv, plan in bench.plans.items():
        reference_side, on_trial = (
            Session(bench.name, bench.config, executor, bench.tokenizer, plan)
            for executor in (ReferenceExecutor(bench.model), bench.executor(bench.model))
        )

        def on_step(what: str, kv: str = kv) -> None:
            bench.tell(f"{kv}: {what}")

        diff = greedy_diff(
            reference_side, on_trial, bench.prompts, dtype=dtype, max_new_tokens=bench.new_tokens, on_step=on_step
        )
        num_positions += diff.fidelity.positions
        facts[f"text in {kv}"] = repr(diff.prompts[0].text_b[:_SHOWN_CHARACTERS])
        if diff.faulty:
            prompt, position = diff.unexplained[0]
            where = f"{kv}, prompt {prompt + 1}, new token {position + 1}"
            message = f"{where}: another token than the reference's, and no near tie"
            return RungFinding(False, message, num_positions, "positions", where, facts)
    message = f"{', '.join(bench.plans)}: the reference's tokens but for near ties, {num_positions} positions"
    return RungFinding(True, message, num_positions, "positions", facts=facts)
