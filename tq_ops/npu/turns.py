"""Keys by stretches, as the programs take them: angles at which stretches begin, by stretch and by token; no PyPTO here."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from haarkv.tq_ops.formats.stretches import MOST_POSITIONS, STRETCH, Turns
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.npu.reads import HEAD_DIM


def unsupported(plan: KVPlan, head_dim: int = HEAD_DIM) -> str | None:
    """None, or in one sentence why no program turns a plan's keys."""
    for layer, (k, _) in enumerate(plan.layers):
        turns = k.turns(layer)
        if turns and 2 * len(turns.inv_freq) != head_dim:
            return f"its programs turn all {head_dim} numbers of a key, and {k.name} turns {2 * len(turns.inv_freq)} of them"
    return None


@cache
def turn_table(turns: Turns, device: torch.device) -> Tensor:
    """[stretches, D] fp32: cos, then sin, of the angles at which stretches begin; the same tensor each time.

    It holds all stretches that there may be, 2 MiB for a D of 128: a program is not compiled for a length.
    """
    return torch.cat(turns.table(MOST_POSITIONS // STRETCH, device), 1).contiguous()


def turns_of_tokens(turns: Turns, positions: Tensor) -> Tensor:
    """The rows [T, D] of that table by which keys at positions [T] are turned back."""
    return turn_table(turns, positions.device)[positions // STRETCH]


@cache
def nothing_turned(device: torch.device, head_dim: int = HEAD_DIM) -> Tensor:
    """What stands for those rows where keys are stored as they are: nobody reads it."""
    return torch.zeros(1, head_dim, device=device)
