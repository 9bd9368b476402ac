"""Faults that the kernels of Gated DeltaNet could have, each a change of their source, and a text that must show them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import planted_kernels
import torch
from delta_runs import Run, whole
from op_tables import relative

from haarkv.tq_ops import reference
from haarkv.tq_ops.cuda import delta
from haarkv.tq_ops.kv.rollback import Advance
from haarkv.tq_ops.table import OpTable
from haarkv.validation.ops.delta import Delta

CASE = Delta(1, 2, 16, 12, (0,), (1,))
"""Heads that share keys, and columns that fill no program."""
TOLD = 7
_MATCH = "match = tl.min(tl.where(had == known, version, 2147483647), 0)"


def _or_else(seen: str) -> str:
    """Reads the version that has seen another number of tokens, where there is one."""
    other = _MATCH.replace("known", seen).replace("match", "other")
    return f"{_MATCH}\n    {other}\n    match = tl.where(other < 2147483647, other, match)"


FAULTS = {
    "decay of another head": ("tl.load(a_log + head)", "tl.load(a_log + (head + 1) % VALUE_HEADS)"),
    "a convolution's state one token late": (
        "if tap > 0:\n            tl.store(kept_at + (tap - 1) *",
        "if tap < TAPS - 1:\n            tl.store(kept_at + tap *",
    ),
    "a state that is not reset": ("tl.where(known == 0, ZEROS, found)", "tl.where(known == 0, 0, found)"),
    "rolled back one step too few": (_MATCH, _or_else("known + 1")),
    "a stale version": (_MATCH, _or_else("known - 1")),
    "written in full": ("gates + 2 * at + 1, 1.0 / (1.0 + tl.exp(-tl.load(b + at)))", "gates + 2 * at + 1, 1.0"),
}


def planted(name: str) -> AbstractContextManager[None]:
    """The kernels with a fault."""
    return planted_kernels.planted(delta, *FAULTS[name])


def off_by(ops: OpTable, device: torch.device | str = "cpu") -> float:
    """How far a text is from the reference's: a prompt, drafts of which one stays, a chunk that is run again, a step, and
    another sequence in the row; infinite where a state is missing."""
    run, (expected, _) = Run(ops, CASE, length=TOLD, device=device), whole(reference, CASE, length=TOLD, told=TOLD)
    try:
        found = [*run.run([0], [2]), *run.run([0], [1])]
        advance = Advance(run.cache, run.paging, run.ids, [2])
        found.append(run.run([0], [2], advance.batch)[0][:1])
        advance.keep([1])
        chunk = run.batch([0], [2])
        run.run([0], [2], chunk)
        found += [*run.run([0], [2], chunk), *run.run([0], [1])]
        run.paging.free(run.ids[0])
        run.ids[0] = run.paging.add()
        found += run.run([0], [1])
    except ValueError:
        return float("inf")
    return float(relative(torch.cat(found).cpu(), torch.cat([expected, expected[:1]])))
