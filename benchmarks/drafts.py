"""Decoding with drafts beside decoding without, in turns: `tq bench drafts --draft NAME`.

A row continues the held-out text of `tiny` greedily from so many tokens, with a draft and without. Times are of the decode
steps alone, from the first new token to the last. The CPU time of one thread does not count what else the machine does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from haarkv.benchmarks.report import Report, Table
from haarkv.benchmarks.timing import OnTurn
from haarkv.engine.draft_choice import DraftSpec
from haarkv.engine.drafts import DraftReport
from haarkv.engine.loading import load
from haarkv.engine.sampling import Sampling
from haarkv.engine.session import Session
from haarkv.models.checkpoint import Progress
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.stored import StoredSequence

_COLUMNS = ("context", "draft", "ms/token", "speed-up", "CPU ms/token", "CPU speed-up", "accepted", "tokens/step", "same text")


@dataclass(frozen=True)
class DraftRequest:
    """What to measure: a draft beside none, behind prompts of some lengths; turns that count come after one that does not."""

    model: str
    executor: str
    kv: str
    draft: DraftSpec
    contexts: Sequence[int]
    new_tokens: int = 128
    dtype: str | None = None
    layers: int | None = None
    device: str | None = None
    repeats: int = 3


@dataclass(frozen=True)
class DraftRow:
    """One draft, or "none", at one context.

    Attributes:
        ms, cpu_ms: a token, median wall time and median CPU time of the calling thread.
        speed_up, cpu_speed_up: medians of the turns' ratios to no drafts; None of none itself.
        same_text: the new tokens are those without drafts.
        drafting: acceptance and the rest, of the last turn.
    """

    context: int
    draft: str
    ms: float
    cpu_ms: float
    speed_up: float | None
    cpu_speed_up: float | None
    same_text: bool
    drafting: DraftReport | None


def measure(request: DraftRequest, progress: Progress | None = None, on_turn: OnTurn = lambda _: None) -> list[DraftRow]:
    """Every row of a request; a context that the model or the text does not have is refused."""
    drafting = load(
        request.model, kv=KVSpec(request.kv), executor=request.executor, device=request.device, dtype=request.dtype,
        layers=request.layers, progress=progress, draft=request.draft, allow_collapse=True,
    )  # fmt: skip
    sessions = [replace(drafting, draft=None), drafting]
    text = sessions[0].tokenizer.encode("\n".join(held_out_texts().values()))
    limit = min(len(text), sessions[0].config.max_position_embeddings - request.new_tokens)
    if max(request.contexts) > limit:
        raise InputError(f"{request.model} can continue {limit:,} tokens of this text, not {max(request.contexts):,}")
    return [row for context in request.contexts for row in _rows(sessions, text[:context], request, on_turn)]


def _rows(sessions: Sequence[Session], prompt: list[int], request: DraftRequest, on_turn: OnTurn) -> list[DraftRow]:
    times: list[list[tuple[float, float]]] = [[] for _ in sessions]
    last: list[tuple[list[int], DraftReport | None]] = [([], None)] * len(sessions)
    # The prompt is computed once: all go on from the same bytes.
    stored = sessions[0].generate([prompt], max_new_tokens=1, keep=True, sampling=Sampling()).stored[0]
    for turn in range(-1, request.repeats):
        for index, session in enumerate(sessions):
            on_turn(f"{_name(session)}, {len(prompt)} tokens")
            seconds, tokens, drafting = _timed(session, prompt, stored, request.new_tokens)
            last[index] = (tokens, drafting)
            if turn >= 0:
                times[index].append(seconds)
    rows = []
    for session, taken, (tokens, drafting) in zip(sessions, times, last, strict=True):
        ratios = [(base[0] / turn[0], base[1] / max(turn[1], 1e-9)) for base, turn in zip(times[0], taken, strict=True)]
        wall, cpu = (1e3 * statistics.median(t[clock] for t in taken) for clock in (0, 1))
        gain, cpu_gain = (statistics.median(r[clock] for r in ratios) if session.draft else None for clock in (0, 1))
        rows.append(DraftRow(len(prompt), _name(session), wall, cpu, gain, cpu_gain, tokens == last[0][0], drafting))
    return rows


def _name(session: Session) -> str:
    return f"{session.draft.name}, up to {session.draft_tokens}" if session.draft else "none"


def _timed(
    session: Session, prompt: list[int], stored: StoredSequence, new_tokens: int
) -> tuple[tuple[float, float], list[int], DraftReport | None]:
    """Wall and CPU seconds a token of the decode steps, the new tokens, and what drafting did."""
    began: list[tuple[float, float]] = []

    def on_token(_index: int, _token: int) -> None:
        if not began:
            began.append((time.perf_counter(), time.thread_time()))

    result = session.generate([prompt], stored=stored, max_new_tokens=new_tokens, sampling=Sampling(), on_token=on_token)
    ended, steps = (time.perf_counter(), time.thread_time()), max(1, len(result.completions[0].token_ids) - 1)
    wall, cpu = ((b - a) / steps for a, b in zip(began[0], ended, strict=True))
    return (wall, cpu), result.completions[0].token_ids, result.drafting


def report(request: DraftRequest, rows: Sequence[DraftRow]) -> Report:
    """What was measured."""

    def shown(value: float | None, form: str = ".2f") -> str:
        return "–" if value is None else format(value, form)

    cells = []
    for r in rows:
        did = r.drafting
        rates = (shown(did.acceptance, ".0%"), shown(did.tokens_per_step)) if did else ("–", "–")
        times = (shown(r.ms), shown(r.speed_up), shown(r.cpu_ms), shown(r.cpu_speed_up))
        cells.append((str(r.context), r.draft, *times, *rates, "yes" if r.same_text else "no"))
    title = f"{request.model}, {request.kv}: {request.new_tokens} new tokens, greedy, median of {request.repeats} turns"
    notes = [f"{r.context:,} tokens: {r.drafting.describe()}" for r in rows if r.drafting]
    values = {"draft": asdict(request.draft), "new_tokens": request.new_tokens, "rows": [asdict(r) for r in rows]}
    return Report("drafts", request.model, request.contexts, [request.kv], values, [Table(title, _COLUMNS, cells)], {0: notes})
