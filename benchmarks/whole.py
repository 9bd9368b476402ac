"""Whole prompts and the steps after them, on real tokens, in turns.

    tq bench decode --only prompt --only step --kv tq4 --contexts 1024,4096

Every side computes the same prompt of random ids and goes on from its own cache. The prompt is so much shorter than the
context that the last step ends with the context full. A time is of a whole call: from ids to the argmax of the last logits.
Sides rest before their turns, until the threads of the one before sleep, and take a step that does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from haarkv.benchmarks.beside import Side, SideError
from haarkv.benchmarks.cases import Case, new_pages, random_prompts, token_bytes
from haarkv.benchmarks.decode_cost import Cost, CostRow, step_cost, whole_prompt_cost
from haarkv.benchmarks.timing import Machine, OnTurn, spread
from haarkv.engine.generation import prefill_in_chunks, tail_chunk
from haarkv.executors.base import Executor, verify
from haarkv.models.base import DecoderModel
from haarkv.models.caches import new_cache
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan

if TYPE_CHECKING:
    from haarkv.benchmarks.attention import Sides
    from haarkv.benchmarks.decode import Request

_REST_S = 0.05  # threads of OpenMP spin for up to 20 ms after a loop
_COUNTED = 3  # steps of a turn that count, after one that does not
_ENOUGH_S = 60.0
"""Prompts of a case are computed again until there are as many turns as asked for, or all took so long together."""
_WARM_UP = 32  # tokens of a prompt that brings weights into memory, and does not count


class Ours(Side):
    """An executor with a cache of a plan."""

    peer = False

    def __init__(self, name: str, executor: Executor, plan: KVPlan) -> None:
        super().__init__(name, token_bytes(plan, executor.config))
        self._executor, self._plan = executor, plan

    def open(self, context: int) -> None:
        self._cache, _ = new_cache(
            self._executor.config, self._plan, sequences=1, tokens=context, device=self._executor.device,
            chunk=tail_chunk(self._executor),
        )  # fmt: skip

    def prompt(self, ids: Sequence[int]) -> float:
        self._paging = new_pages(self._cache)
        began, self._sequence = time.perf_counter(), self._paging.add()
        prefill_in_chunks(self._executor, [ids], [self._sequence], self._paging, self._cache).argmax(-1).tolist()
        return time.perf_counter() - began

    def steps(self, ids: Sequence[int]) -> list[float]:
        taken, device = [], self._cache.device
        for token in ids:
            began = time.perf_counter()
            batch = self._paging.batch([self._sequence], [1]).to(device)
            verify(self._executor, torch.tensor([token], device=device), batch, self._cache).argmax(-1).tolist()
            taken.append(time.perf_counter() - began)
        return taken


def check(request: Request, sides: Sides) -> None:
    """Refuse, before any work, a request whose prompts and steps cannot be measured."""
    if tuple(request.batches) != (1,):
        raise InputError("whole prompts are measured with one sequence; leave out --batches")
    if min(request.contexts) <= _steps(request):
        raise InputError(f"a context of {min(request.contexts)} is too short for a prompt and {_steps(request)} steps")
    if all(executor.simulated for executor, _ in sides.values()):
        raise InputError("on a simulated device no prompt is timed; choose another --executor")


def measure(request: Request, model: DecoderModel, sides: Sides, machine: Machine, on_turn: OnTurn) -> list[CostRow]:
    """Prompts and steps of every side at every context."""
    all_sides: list[Side] = [Ours(name, *pair) for name, pair in sides.items() if not pair[0].simulated]
    all_sides += request.beside.sides(model)
    failed: dict[str, str] = {}
    rows: list[CostRow] = []
    for context in request.contexts:
        at_context = AtContext(request, model, all_sides, context, failed)
        at_context.measure(on_turn)
        rows += at_context.rows(machine)
    return rows


def _steps(request: Request) -> int:
    """Tokens that steps append."""
    return (1 + _COUNTED) * request.repeats if "step" in request.kinds else 0


class AtContext:
    """One context: every side's prompt, then its steps; sides that `failed` are out, and one that fails here is added."""

    def __init__(
        self, request: Request, model: DecoderModel, sides: Sequence[Side], context: int, failed: dict[str, str]
    ) -> None:
        self.request, self.model, self.sides, self.context, self.failed = request, model, sides, context, failed
        (ids,) = random_prompts(model.config, 1, context, context)
        self.ids, self.new = ids[: context - _steps(request)], ids[context - _steps(request) :]
        self.seconds: dict[tuple[str, str], list[float]] = {(k, s.name): [] for k in ("prompt", "step") for s in sides}

    def measure(self, on_turn: OnTurn) -> None:
        """Time every side in turns."""
        for side in self.sides:
            self._try(side, partial(side.open, self.context))
            self._try(side, partial(side.prompt, self.ids[:_WARM_UP]))
        for _ in range(self.request.repeats):
            for side in self._alive():
                on_turn(f"a prompt of {len(self.ids):,} tokens, {side.name}")
                self._try(side, partial(self._prompt, side))
            if sum(sum(seconds) for (kind, _), seconds in self.seconds.items() if kind == "prompt") >= _ENOUGH_S:
                break
        for begin in range(0, len(self.new), 1 + _COUNTED):
            for side in self._alive():
                on_turn(f"steps at {self.context:,} tokens, {side.name}")
                self._try(side, partial(self._turn, side, begin))
        for side in self._alive():
            side.shut()

    def _alive(self) -> list[Side]:
        return [side for side in self.sides if side.name not in self.failed]

    def _try(self, side: Side, run: Callable[[], object]) -> None:
        """Call a side; one that fails is out from here on."""
        if side.name not in self.failed:
            try:
                run()
            except SideError as error:
                self.failed[side.name] = f"at {self.context:,} tokens: {error}"

    def _prompt(self, side: Side) -> None:
        time.sleep(_REST_S)
        self.seconds["prompt", side.name].append(side.prompt(self.ids))

    def _turn(self, side: Side, begin: int) -> None:
        time.sleep(_REST_S)
        self.seconds["step", side.name] += side.steps(self.new[begin : begin + 1 + _COUNTED])[1:]

    def rows(self, machine: Machine) -> Iterator[CostRow]:
        """What was measured, of the kinds that were asked for."""
        case, tokens = Case(1, self.context), len(self.ids)

        def made(kind: str, side: Side, cost: Cost, length: int | None) -> CostRow:
            times = self.seconds[kind, side.name]
            taken, note = (spread(times), "") if times else (None, self.failed.get(side.name, ""))
            return CostRow(kind, side.name, case, cost, machine, taken, note, None, length, len(times), side.about, side.peer)

        for side in self.sides if "prompt" in self.request.kinds else ():
            yield made("prompt", side, whole_prompt_cost(self.model, tokens, side.token_bytes), tokens)
        for side in self.sides if "step" in self.request.kinds else ():
            yield made("step", side, step_cost(self.model, case, side.token_bytes), None)
