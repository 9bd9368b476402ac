"""The rung of greedy text: every format continued by the executor and by the reference, token for token."""

from __future__ import annotations

from functools import partial

from haarkv.executors.reference import ReferenceExecutor
from haarkv.validation.bringup.result import Found, Table
from haarkv.validation.bringup.workbench import Workbench
from haarkv.validation.fidelity.greedy_diff import GreedyDiff, greedy_diff

_SHOWN = 100
_COLUMNS = ("format", "tokens like the reference's", "positions", "near ties", "KL from the reference", "text")


def greedy_text(bench: Workbench) -> Found:
    """The executor's text in each format against the reference's in the same; formats beside one another."""
    rows: list[tuple[str, ...]] = []
    texts: dict[str, list[int]] = {}
    compared = 0
    for kv, plan in bench.plans.items():
        executor = bench.executor(bench.model, plan)
        trusted, on_trial = (bench.session(one, plan) for one in (ReferenceExecutor(bench.model), executor))
        diff = greedy_diff(
            trusted, on_trial, bench.prompts, dtype=bench.dtype, max_new_tokens=bench.new_tokens,
            on_step=partial(_tell, bench, kv),
        )  # fmt: skip
        compared += diff.fidelity.positions
        texts[kv] = diff.prompts[0].b.token_ids
        rows.append(_row(kv, diff))
        tables = (Table("Texts of the executor", _COLUMNS, tuple(rows)), *_beside(texts))
        if diff.faulty:
            prompt, position = diff.unexplained[0]
            where = f"{kv}, prompt {prompt + 1}, new token {position + 1}"
            said = f"{where}: another token than the reference's, and no near tie"
            return Found(False, said, compared, "positions", where, tables=tables)
    said = f"{', '.join(texts)}: the reference's tokens but for near ties, {compared} positions"
    return Found(True, said, compared, "positions", tables=tables)


def _tell(bench: Workbench, kv: str, what: str) -> None:
    bench.tell(f"{kv}: {what}")


def _row(kv: str, diff: GreedyDiff) -> tuple[str, ...]:
    same = sum(_common(row.a.token_ids, row.b.token_ids) for row in diff.prompts)
    made = sum(len(row.a.token_ids) for row in diff.prompts)
    measured = diff.fidelity
    return (
        kv, f"{same} of {made}", str(measured.positions), str(diff.near_ties), f"{measured.kl_mean:.1e}",
        repr(diff.prompts[0].text_b[:_SHOWN]),
    )  # fmt: skip


def _beside(texts: dict[str, list[int]]) -> tuple[Table, ...]:
    """How far each format's text goes with the first one's; between formats a difference is no fault."""
    first, *others = texts
    if not others:
        return ()
    rows = tuple((kv, f"{_common(texts[first], texts[kv])} of {len(texts[first])}") for kv in others)
    return (Table(f"New tokens before another one than {first}'s", ("format", "tokens"), rows),)


def _common(a: list[int], b: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
