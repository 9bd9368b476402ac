"""Decoding with drafts beside decoding without, in turns: `python -m lab.bench drafts --draft NAME`.

A row continues a text greedily behind a context: without drafts, with a draft of which nothing is known yet, as in the
first run of a session, and with one that was measured in earlier runs. Times are of the decode steps, from the first new token
to the last, and of the whole call. The prompt is computed once for all, unless the draft goes on from the model's hidden
states, which are noted as it is computed. The CPU time of one thread does not count what else the machine does, but grows
where caches are shared, so that the lower quartile of the turns counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from haarkv.benchmarks.report import Report, Table
from haarkv.benchmarks.timing import OnTurn
from haarkv.engine.draft_choice import DraftSpec
from haarkv.engine.drafts import Experience
from haarkv.engine.loading import load
from haarkv.engine.result import DraftReport
from haarkv.engine.sampling import Sampling
from haarkv.engine.session import Session
from haarkv.models.checkpoint import Progress
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.stored import StoredSequence

_COLUMNS = (
    "context", "draft", "ms/token", "speed-up", "CPU ms/token", "CPU speed-up", "with prompt", "accepted", "tokens/step",
    "same text",
)  # fmt: skip


@dataclass(frozen=True)
class DraftRequest:
    """What to measure: a draft beside none, behind prompts of some lengths; turns that count come after one that does not.

    Attributes:
        text: to continue; None is the held-out text of `tiny`.
    """

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
    text: str | None = None


@dataclass(frozen=True)
class DraftRow:
    """One draft, or "none", at one context.

    Attributes:
        known: it was measured in the turns before, as in later runs of a session.
        ms, cpu_ms: a token, median wall time and the lower quartile of the calling thread's CPU time.
        speed_up: median of the turns' ratios to no drafts; None of none itself.
        cpu_speed_up, whole_speed_up: ratios of CPU times, of the decode steps and of the whole call.
        same_text: the new tokens are those without drafts.
        drafting: acceptance and the rest, of the last turn.
    """

    context: int
    draft: str
    known: bool
    ms: float
    cpu_ms: float
    speed_up: float | None
    cpu_speed_up: float | None
    whole_speed_up: float | None
    same_text: bool
    drafting: DraftReport | None


def measure(request: DraftRequest, progress: Progress | None = None, on_turn: OnTurn = lambda _: None) -> list[DraftRow]:
    """Every row of a request; a context that the model or the text does not have is refused."""
    drafting = load(
        request.model, kv=KVSpec(request.kv), executor=request.executor, device=request.device, dtype=request.dtype,
        layers=request.layers, progress=progress, draft=request.draft, allow_collapse=True,
    )  # fmt: skip
    sessions = [replace(drafting, draft=None), drafting, drafting]
    text = sessions[0].tokenizer.encode("\n".join(held_out_texts().values()) if request.text is None else request.text)
    limit = min(len(text), sessions[0].config.max_position_embeddings - request.new_tokens)
    if max(request.contexts) > limit:
        raise InputError(f"{request.model} can continue {limit:,} tokens of this text, not {max(request.contexts):,}")
    return [row for context in request.contexts for row in _rows(sessions, text[:context], request, on_turn)]


def _rows(sessions: Sequence[Session], prompt: list[int], request: DraftRequest, on_turn: OnTurn) -> list[DraftRow]:
    turns: list[list[_Times]] = [[] for _ in sessions]
    last: list[tuple[list[int], DraftReport | None]] = [([], None)] * len(sessions)
    prefix = None
    if (draft := sessions[1].draft) and draft.name != "mtp":
        prefix = sessions[0].generate([prompt], max_new_tokens=1, keep=True, sampling=Sampling()).stored[0]
    sessions = [sessions[0], sessions[1], _forgetful(sessions[2])]
    for turn in range(-1, request.repeats):
        # Back and forth, so that none always comes behind the same one.
        for index, session in list(enumerate(sessions))[:: -1 if turn % 2 else 1]:
            on_turn(f"{_name(session)}, {len(prompt)} tokens")
            times, tokens, drafting = _time_run(
                _forgetful(session) if index == 1 else session, prompt, prefix, request.new_tokens
            )
            last[index] = (tokens, drafting)
            if turn >= 0:
                turns[index].append(times)
    rows = []
    base = _Turns.from_times(turns[0])
    for index, (session, session_times, (tokens, drafting)) in enumerate(zip(sessions, turns, last, strict=True)):
        ours, has_experience, same = _Turns.from_times(session_times), index == 2, tokens == last[0][0]
        gain, cpu_gain, whole = ours.gains(base) if session.draft else (None, None, None)
        name, ms, cpu_ms = _name(session), ours.ms, 1e3 * ours.cpu
        rows.append(DraftRow(len(prompt), name, has_experience, ms, cpu_ms, gain, cpu_gain, whole, same, drafting))
    return rows


def _forgetful(session: Session) -> Session:
    """The session before its first run: of its draft nothing is known."""
    return replace(session, draft=replace(session.draft, experience=Experience()))  # type: ignore[type-var]


def _name(session: Session) -> str:
    return f"{session.draft.name}, up to {session.draft_tokens}" if session.draft else "none"


@dataclass(frozen=True)
class _Times:
    """Seconds: wall and CPU time a token of the decode steps, and CPU time of the whole call."""

    wall: float
    cpu: float
    whole: float


@dataclass(frozen=True)
class _Turns:
    """The turns of one session: wall times in order, and the lower quartiles of CPU times."""

    wall: list[float]
    cpu: float
    whole: float

    @classmethod
    def from_times(cls, turns: Sequence[_Times]) -> _Turns:
        quarter = len(turns) // 4
        cpu, whole = (sorted(samples)[quarter] for samples in ([t.cpu for t in turns], [t.whole for t in turns]))
        return cls([t.wall for t in turns], cpu, whole)

    @property
    def ms(self) -> float:
        return 1e3 * statistics.median(self.wall)

    def gains(self, base: _Turns) -> tuple[float, float, float]:
        """How many times as fast: wall time, CPU time, CPU time of the whole call."""
        wall = statistics.median(b / ours for b, ours in zip(base.wall, self.wall, strict=True))
        return wall, base.cpu / max(self.cpu, 1e-9), base.whole / max(self.whole, 1e-9)


def _time_run(
    session: Session, prompt: list[int], prefix: StoredSequence | None, new_tokens: int
) -> tuple[_Times, list[int], DraftReport | None]:
    """A run's times, its new tokens, and what drafting did."""
    first: list[tuple[float, float]] = []

    def on_token(_index: int, _token: int) -> None:
        if not first:
            first.append((time.perf_counter(), time.thread_time()))

    began = time.thread_time()
    result = session.generate([prompt], stored=prefix, max_new_tokens=new_tokens, sampling=Sampling(), on_token=on_token)
    end, steps = (time.perf_counter(), time.thread_time()), max(1, len(result.completions[0].token_ids) - 1)
    wall, cpu = ((b - a) / steps for a, b in zip(first[0], end, strict=True))
    return _Times(wall, cpu, end[1] - began), result.completions[0].token_ids, result.drafting


def report(request: DraftRequest, rows: Sequence[DraftRow]) -> Report:
    """What was measured."""

    def format_cell(value: float | None, form: str = ".2f") -> str:
        return "–" if value is None else format(value, form)

    cells = []
    for r in rows:
        did = r.drafting
        rates = (format_cell(did.acceptance, ".0%"), format_cell(did.tokens_per_step)) if did else ("–", "–")
        times = (
            format_cell(r.ms),
            format_cell(r.speed_up),
            format_cell(r.cpu_ms),
            format_cell(r.cpu_speed_up),
            format_cell(r.whole_speed_up),
        )
        cells.append((str(r.context), r.draft + ", known" * r.known, *times, *rates, "yes" if r.same_text else "no"))
    title = f"{request.model}, {request.kv}: {request.new_tokens} new tokens, greedy, median of {request.repeats} turns"
    notes = [f"{r.context:,} tokens{', known' * r.known}: {r.drafting.describe()}" for r in rows if r.drafting]
    values = {"draft": asdict(request.draft), "new_tokens": request.new_tokens, "rows": [asdict(r) for r in rows]}
    return Report("drafts", request.model, request.contexts, [request.kv], values, [Table(title, _COLUMNS, cells)], {0: notes})
