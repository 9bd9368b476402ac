"""Latency of an executor by context and format: a prompt, a decode step and one call of a layer, by the device's own clock.

In a simulator each is called once, so that it is known to run; its times mean nothing and are not given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from haarkv.benchmarks import cases
from haarkv.benchmarks.cases import Case
from haarkv.benchmarks.timing import OnTurn, Spread, take_turns
from haarkv.engine.generation import prefill_in_chunks
from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan

REPEATS, WARM_UP = 7, 2


class Call(NamedTuple):
    """A `prefill` of `context` tokens, a decode `step` behind so many, or a `layer`'s call in such a step, in one format.

    Attributes:
        tokens: that the call takes in, of all sequences.
        taken: its times; None in a simulator.
    """

    kind: str
    kv: str
    context: int
    tokens: int
    taken: Spread | None


def measure_latency(
    executor: Executor, model: DecoderModel, plans: Mapping[str, KVPlan], contexts: Sequence[int], *, batch: int = 1,
    on_turn: OnTurn = lambda _: None,
) -> Iterator[Call]:  # fmt: skip
    """Every call, format and context; the formats of a case take turns over the same K and V.

    Raises:
        InputError: a call whose result is not finite, or all of one value.
    """
    for case in (Case(batch, context) for context in contexts):
        for kind in ("prefill", "step", "layer"):
            runs = {kv: _checked(_run(kind, executor, model, plan, case), f"{kind} {kv}") for kv, plan in plans.items()}
            named = {f"{kind} {kv} {case.context}": run for kv, run in runs.items()}
            tokens = case.batch * (case.context if kind == "prefill" else 1)
            times: dict[str, Spread] = {}
            if executor.simulated:
                for name, run in named.items():
                    on_turn(name)
                    run()
            else:
                times = take_turns(named, executor.device, repeats=REPEATS, warm_up=WARM_UP, cold=False, on_turn=on_turn)
            yield from (Call(kind, kv, case.context, tokens, times.get(name)) for kv, name in zip(runs, named, strict=True))


def _run(kind: str, executor: Executor, model: DecoderModel, plan: KVPlan, case: Case) -> Callable[[], Tensor]:
    """A call that can be repeated; it gives logits or hidden states."""
    config, device = model.config, executor.device
    if kind != "prefill":
        held = cases.filled(plan, config, case, *cases.random_kv(config, case, device), REPEATS + WARM_UP)
        step = kind == "step"
        return cases.decode_step(executor, *held, case) if step else cases.layer_call(executor, model, *held, case)
    empty, _ = cases.new_cache(plan, config, case.context, case.batch, device)
    prompts = cases.random_prompts(config, case.batch, case.context, 3)

    def prompt() -> Tensor:
        paging = cases.new_pages(empty)
        return prefill_in_chunks(executor, prompts, [paging.add() for _ in prompts], paging, empty)

    return prompt


def _checked(run: Callable[[], Tensor], name: str) -> Callable[[], None]:
    """The call, refused if its first result, which counts in no figure, is none."""
    sound = False

    def call() -> None:
        nonlocal sound
        result = run()
        if not sound:
            low, high = result.amin().item(), result.amax().item()
            if not -math.inf < low < high < math.inf:
                raise InputError(f"{name} gives no numbers: from {low} to {high}")
            sound = True

    return call
