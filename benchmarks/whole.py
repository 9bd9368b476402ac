"""Whole prompts and the steps after them, on real tokens: ours, transformers and llama.cpp, in turns.

    tq bench decode --only prompt --only step --kv tq4 --contexts 1024,4096 --peers llama.cpp,transformers

Every side computes the same prompt of random ids and goes on from its own cache. The prompt is so much shorter than the
context that the last step ends with the context full. A time is of a whole call: from ids to the argmax of the last logits.
Sides rest before their turns, until the threads of the one before sleep, and take a step that does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from haarkv.benchmarks import decode_peers, gguf_file, llama_process
from haarkv.benchmarks.decode_cost import Case, Cost, CostRow, row, step_cost, whole_prompt_cost
from haarkv.benchmarks.kept import KeptTimes
from haarkv.benchmarks.llama_process import LlamaError, LlamaKV, LlamaProcess
from haarkv.benchmarks.report import machine as this_machine
from haarkv.benchmarks.timing import Machine, OnTurn, spread
from haarkv.engine.generation import prefill_in_chunks
from haarkv.executors.base import Executor
from haarkv.models.base import DecoderModel
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.shapes import blocks_for
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.temporary import TemporaryFolder

if TYPE_CHECKING:
    from haarkv.benchmarks.attention import Sides
    from haarkv.benchmarks.decode import Request

_REST_S = 0.05
"""Threads of OpenMP spin for up to 20 ms after a loop."""
_COUNTED = 3
"""Steps of a turn that count, after one that does not."""
_ENOUGH_S = 60.0
"""Prompts of a case are computed again until there are as many turns as asked for, or all took so long together."""
_WARM_UP = 32
"""Tokens of a prompt that brings weights into memory, and does not count."""


class Side(Protocol):
    """Someone with a cache of their own.

    Attributes:
        name: of its rows.
        token_bytes: of K and V of one token, all layers and heads.
        about: whose program it is, and how it was built; empty of ours.
    """

    name: str
    token_bytes: float
    about: str

    def open(self, context: int) -> None:
        """Make room for so many tokens."""

    def prompt(self, ids: Sequence[int]) -> float:
        """Forget everything, and compute a prompt; seconds."""

    def steps(self, ids: Sequence[int]) -> list[float]:
        """A step for each token; seconds of each."""

    def shut(self) -> None:
        """Give that room back."""


class Ours:
    """An executor with a cache of a plan."""

    about = ""

    def __init__(self, name: str, executor: Executor, plan: KVPlan) -> None:
        config = executor.config
        self.name, self._executor, self._plan = name, executor, plan
        self.token_bytes = plan.bytes_per_token(config.heads.num_kv_heads, config.heads.head_dim)

    def open(self, context: int) -> None:
        config = self._executor.config
        self._cache: PagedKVCache | None = PagedKVCache(
            self._plan, config.kv_shapes, num_blocks=blocks_for(context),
            num_rows=1, device=self._executor.device,
        )  # fmt: skip

    def shut(self) -> None:
        self._cache = None

    def prompt(self, ids: Sequence[int]) -> float:
        cache = self._opened
        self._paging = PagedSequences(cache.num_blocks, cache.block_size, num_rows=1)
        began, self._sequence = time.perf_counter(), self._paging.add()
        prefill_in_chunks(self._executor, [ids], [self._sequence], self._paging, cache).argmax(-1).tolist()
        return time.perf_counter() - began

    def steps(self, ids: Sequence[int]) -> list[float]:
        taken, cache = [], self._opened
        for token in ids:
            began = time.perf_counter()
            batch = self._paging.batch([self._sequence], [1]).to(cache.device)
            self._executor.decode(torch.tensor([token], device=cache.device), batch, cache).argmax(-1).tolist()
            taken.append(time.perf_counter() - began)
        return taken

    @property
    def _opened(self) -> PagedKVCache:
        assert self._cache is not None
        return self._cache


class Transformers:
    """transformers' own model with the same weights, and its `DynamicCache`; nothing of it is needed before `open`."""

    name, about = "hf DynamicCache bf16", ""

    def __init__(self, model: DecoderModel) -> None:
        config = model.config
        self.token_bytes = 2.0 * config.num_layers * config.heads.num_kv_heads * config.heads.head_dim * model.dtype.itemsize
        self._ours, self._model, self._cache = model, cast(Any, None), cast(Any, None)

    def open(self, context: int) -> None:
        self._model = self._model or decode_peers.their_model(self._ours, "sdpa")
        self.about = f"transformers {version('transformers')} with SDPA"

    def shut(self) -> None:
        self._cache = None

    def prompt(self, ids: Sequence[int]) -> float:
        self._cache = decode_peers.their_cache(self._model.config, package=None)
        return self._call(ids)

    def steps(self, ids: Sequence[int]) -> list[float]:
        return [self._call([token]) for token in ids]

    @torch.inference_mode()
    def _call(self, ids: Sequence[int]) -> float:
        began = time.perf_counter()
        given = torch.tensor([list(ids)])
        out = self._model(input_ids=given, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        out.logits[:, -1].argmax(-1).tolist()
        return time.perf_counter() - began


class Llama:
    """llama.cpp with one kind of KV cache."""

    def __init__(self, process: LlamaProcess, kind: LlamaKV, model: DecoderModel) -> None:
        config = model.config
        self.name, self.about = f"llama.cpp {kind.name}", process.about
        self.token_bytes = 2 * config.num_layers * config.heads.num_kv_heads * config.heads.head_dim * kind.bits / 8
        self._process, self._kind = process, kind

    def open(self, context: int) -> None:
        self._process.open(self._kind, context)

    def shut(self) -> None:
        self._process.shut(self._kind)

    def prompt(self, ids: Sequence[int]) -> float:
        return self._process.prompt(self._kind, ids)

    def steps(self, ids: Sequence[int]) -> list[float]:
        return self._process.steps(self._kind, ids)


# -- Measuring -------------------------------------------------------------------------------------------------------------


def check(request: Request, model: DecoderModel, sides: Sides) -> None:
    """Check, before any work, that a request's prompts and steps can be measured.

    Raises:
        InputError: they cannot.
    """
    if tuple(request.batches) != (1,):
        raise InputError("whole prompts, and llama.cpp, are measured with one sequence; leave out --batches")
    if min(request.contexts) <= _steps(request):
        raise InputError(f"a context of {min(request.contexts)} is too short for a prompt and {_steps(request)} steps")
    if all(executor.simulated for executor, _ in sides.values()):
        raise InputError("on a simulated device no prompt is timed; choose another --executor")
    if decode_peers.LLAMA in request.peers:
        llama_process.require()
        if reason := gguf_file.unsupported(model.config):
            raise InputError(f"llama.cpp is no peer of {request.model}: {reason}")
        if any(executor.device.type != "cpu" for executor, _ in sides.values()):
            raise InputError("llama.cpp is built for the CPU here; leave it out of --peers, or choose --executor cpu")


def measure(request: Request, model: DecoderModel, sides: Sides, machine: Machine, on_turn: OnTurn) -> list[CostRow]:
    """Prompts and steps of every side at every context; what `request.resume` has already is not measured again.

    Raises:
        InputError: as `check`, or that file cannot be used.
    """
    kept = KeptTimes(request.resume, _run(request))
    with ExitStack() as stack:
        all_sides: list[Side] = [Ours(name, *pair) for name, pair in sides.items() if not pair[0].simulated]
        failed: dict[str, str] = {}
        if decode_peers.LLAMA in request.peers:
            all_sides += _llama_sides(request, model, stack, on_turn)
        if decode_peers.TRANSFORMERS in request.peers:
            all_sides.append(Transformers(model))
            if missing := decode_peers.transformers_missing(model.config):
                failed[Transformers.name] = missing
        rows: list[CostRow] = []
        for context in request.contexts:
            case = _Case(request, model, all_sides, kept, context, machine, failed)
            case.measure(on_turn)
            rows += case.rows()
        return rows


def _run(request: Request) -> dict[str, Any]:
    names = ("model", "dtype", "layers", "isa", "repeats")
    whole = [kind for kind in ("prompt", "step") if kind in request.kinds]
    return {"machine": this_machine(), "kinds": whole} | {name: getattr(request, name) for name in names}


def _steps(request: Request) -> int:
    """Tokens that steps append."""
    return (1 + _COUNTED) * request.repeats if "step" in request.kinds else 0


def _llama_sides(request: Request, model: DecoderModel, stack: ExitStack, on_turn: OnTurn) -> list[Llama]:
    with TemporaryFolder("gguf") as folder:
        on_turn("the GGUF being written")
        gguf_file.write(folder / "model.gguf", model)
        on_turn("llama.cpp loading it")
        try:
            # It maps the file into memory, so that the file can go.
            process = stack.enter_context(LlamaProcess(folder / "model.gguf", torch.get_num_threads()))
        except LlamaError as error:
            raise InputError(f"llama.cpp cannot be measured: {error}") from None
    return [Llama(process, kind, model) for kind in request.llama_kvs]


class _Case:
    """One context: every side's prompt, then its steps."""

    def __init__(
        self, request: Request, model: DecoderModel, sides: Sequence[Side], kept: KeptTimes, context: int, machine: Machine,
        failed: dict[str, str],
    ) -> None:  # fmt: skip
        self.request, self.model, self.sides, self.kept, self.machine = request, model, sides, kept, machine
        self.context, self.failed = context, failed
        draw = torch.Generator().manual_seed(context)
        ids = torch.randint(model.config.vocab_size, (context,), generator=draw).tolist()
        self.ids, self.new = ids[: context - _steps(request)], ids[context - _steps(request) :]

    def measure(self, on_turn: OnTurn) -> None:
        """Whatever is missing."""
        if self._enough_prompts() and self._missing_turns() == 0:
            return
        for side in self.sides:
            self._try(side, partial(side.open, self.context))
            self._try(side, partial(side.prompt, self.ids[:_WARM_UP]))
        while True:
            for side in self._alive():
                on_turn(f"a prompt of {len(self.ids):,} tokens, {side.name}")
                time.sleep(_REST_S)
                self._try(side, partial(self._prompt, side))
            if self._enough_prompts():
                break
        for turn in range(self._missing_turns()):
            for side in self._alive():
                on_turn(f"steps at {self.context:,} tokens, {side.name}")
                time.sleep(_REST_S)
                self._try(side, partial(self._turn, side, turn))
        for side in self._alive():
            side.shut()

    def _alive(self) -> list[Side]:
        return [side for side in self.sides if side.name not in self.failed]

    def _try(self, side: Side, run: Callable[[], object]) -> None:
        """Call a side; one that fails is out from here on."""
        if side.name not in self.failed:
            try:
                run()
            except LlamaError as error:
                self.failed[side.name] = f"at {self.context:,} tokens {error}"

    def _prompt(self, side: Side) -> None:
        self.kept.add("prompt", self.context, side.name, [side.prompt(self.ids)])

    def _turn(self, side: Side, turn: int) -> None:
        begin = turn * (1 + _COUNTED)
        taken = side.steps(self.new[begin : begin + 1 + _COUNTED])
        self.kept.add("step", self.context, side.name, taken[1:])

    def _enough_prompts(self) -> bool:
        taken = [self.kept.of("prompt", self.context, side.name) for side in self._alive()]
        fewest = min(map(len, taken), default=self.request.repeats)
        return fewest >= self.request.repeats or (fewest > 0 and sum(map(sum, taken)) >= _ENOUGH_S)

    def _missing_turns(self) -> int:
        """Turns of steps that the side with the fewest still needs."""
        if "step" not in self.request.kinds:
            return 0
        fewest = min((len(self.kept.of("step", self.context, side.name)) for side in self._alive()), default=0)
        return max(0, self.request.repeats - fewest // _COUNTED)

    def rows(self) -> Iterator[CostRow]:
        """What was measured, of the kinds that were asked for."""
        for kind in ("prompt", "step"):
            for side in self.sides if kind in self.request.kinds else ():
                case, tokens = Case(1, self.context), len(self.ids)
                cost = self._cost(kind, side)
                times = self.kept.of(kind, self.context, side.name)
                taken, note = (spread(times), "") if times else (None, self.failed.get(side.name, ""))
                made = row(kind, side.name, case, cost, self.machine, taken, note)
                yield replace(made, about=side.about, runs=len(times), tokens=tokens if kind == "prompt" else None)

    def _cost(self, kind: str, side: Side) -> Cost:
        if kind == "prompt":
            return whole_prompt_cost(self.model, len(self.ids), side.token_bytes)
        return step_cost(self.model, Case(1, self.context), side.token_bytes)
