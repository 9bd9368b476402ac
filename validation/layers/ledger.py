"""What a run has measured so far of each layer, and whether rounding explains so much of it: ties by rate, bias, distance.

Single numbers may each be excused. Here they are summed, by layer, side, KV head and stage, over all forwards, and held
against what rounding makes of so many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.validation import bounds
from haarkv.validation.layers.chance import Chances, expected, log10_of_so_many, one_sided, stored_differently
from haarkv.validation.layers.parts import Part, Stored, parts_of
from haarkv.validation.layers.report import Measured, Verdict
from haarkv.validation.layers.three_way import Errors
from haarkv.validation.layers.windows import SLIPS

_LIMIT = math.log10(bounds.CHANCE)
_Key = tuple[str, int | None, str, str, int]
"""Drive, layer (None: all), stage, what errors are projected on, KV head."""
_FEWEST = 16  # vectors of which a distance is judged


@dataclass(frozen=True)
class _Tokens:
    """What tokens stored in one part of a layer, or of several, one after the other.

    Attributes:
        levels, lengths: bool [T, H], vectors that differ.
        off: fp64 [T, H], relative differences of length.
        alike: int64 [T], the same number for tokens of which the reference stored the same.
        chances: of those tokens for which they were asked; None of none. In the others nothing differed.
    """

    levels: Tensor
    lengths: Tensor
    off: Tensor
    alike: Tensor
    chances: Chances | None = None

    def __add__(self, other: _Tokens) -> _Tokens:
        fields = ("levels", "lengths", "off", "alike")
        added = {name: torch.cat([getattr(x, name) for x in (self, other)]) for name in fields}
        return _Tokens(**added, chances=_both(self.chances, other.chances))


def _both(one: Chances | None, other: Chances | None) -> Chances | None:
    if one is None or other is None:
        return one or other
    return Chances(torch.cat([one.levels, other.levels], 1), torch.cat([one.lengths, other.lengths], 1))


class Ledger:
    """Sums over a run.

    Args:
        ours: cache of the reference, whose formats and number of KV heads count.
    """

    def __init__(self, ours: PagedKVCache) -> None:
        self._cache = ours
        self._stored: dict[tuple[str, int, str], _Tokens] = {}
        self._errors: dict[_Key, Errors] = {}

    # -- K and V -------------------------------------------------------------------------------------------------------
    def stored(
        self, drive: str, layer: int, ours: Stored, theirs: Stored, chances: Callable[[], Mapping[str, Chances]]
    ) -> dict[str, Verdict]:
        """Add what a layer stored of a forward's tokens; what is no rounding, by stage.

        Args:
            drive: "ops" or "layers"; each is summed by itself.
            ours, theirs: fields [n, Hkv, *] by part.
            chances: by part; called only where something differs.
        """
        parts = [part for part in parts_of(self._cache, layer) if len(next(iter(ours[part.name].values())))]
        now = {
            part.name: _Tokens(
                *stored_differently(part.kv_format, layer, ours[part.name], theirs[part.name]), _digests(ours[part.name])
            )
            for part in parts
        }
        differs = any(tokens.levels.any() or tokens.lengths.any() for tokens in now.values())
        likely, verdicts = chances() if differs else {}, {}
        for part in parts:
            key, tokens = (drive, layer, part.name), replace(now[part.name], chances=likely.get(part.name))
            kept = self._stored[key] = self._stored[key] + tokens if key in self._stored else tokens
            if differs and (verdict := self._judge_part(kept, part, self._cache.shape(layer).num_kv_heads)) is not None:
                verdicts[verdict.stage] = verdict
        return verdicts

    def _judge_part(self, kept: _Tokens, part: Part, heads: int) -> Verdict | None:
        of_heads = [slice(None), *(slice(head, head + 1) for head in range(heads) if heads > 1)]
        found: list[tuple[float, str, int | None]] = []
        for some in of_heads:
            head = None if some.start is None else some.start
            for log10, words in (*_rates(kept, some, part.title), _bias(kept, some, part.title)):
                if log10 < _LIMIT:
                    found.append((log10, words, head))
        if not found:
            return None
        guilty = {head for _, _, head in found if head is not None}
        worst = min(found, key=lambda one: (one[2] is not None, one[0]))
        head = guilty.pop() if len(guilty) == 1 and heads > 1 else None
        return Verdict(part.stage, "fault", -worst[0], -_LIMIT, worst[1], head=head)

    # -- Numbers -------------------------------------------------------------------------------------------------------
    def numbers(self, drive: str, layer: int, stage: str, errors: Mapping[str, Sequence[Errors]]) -> Verdict | None:
        """Add the errors of a stage, by what they were projected on and by KV head; what is no rounding, if anything."""
        worst: tuple[float, Verdict, str] | None = None
        shares: dict[str, list[tuple[float, float]]] = {}
        for name, parts in errors.items():
            for head, part in enumerate(parts):
                key = (drive, layer, stage, name, head)
                total = self._errors[key] = self._errors[key] + part if key in self._errors else part
                every = (drive, None, stage, name, head)
                self._errors[every] = self._errors[every] + part if every in self._errors else part
                share, verdict = _judge_errors(stage, name, total)
                shares.setdefault(name, []).append((total.share, share))
                if share > 1 and (worst is None or share > worst[0]):
                    worst = share, verdict, name
        if worst is None:
            return None
        by_head = shares[worst[2]]
        # Too large tells heads apart; too far off may be the same figure for all of them.
        too_large = [head for head, (gain, _) in enumerate(by_head) if gain > 1]
        guilty = too_large or [head for head, (_, share) in enumerate(by_head) if share > 1]
        if worst[2] in SLIPS:  # a slip that is there is there once; of some heads it might be, and not be seen
            parts = [self._errors[drive, layer, stage, worst[2], head] for head in range(len(by_head))]
            guilty = [head for head, part in enumerate(parts) if head in guilty or abs(part.gain - 1) <= part.limit]
        return replace(worst[1], head=guilty[0] if len(guilty) == 1 < len(by_head) else None)

    # -- The whole run -------------------------------------------------------------------------------------------------
    def totals(self) -> list[Verdict]:
        """What only all layers together show, of the layer that shows it most."""
        found: list[Verdict] = []
        for drive, name in dict.fromkeys((drive, name) for drive, _, name in self._stored):
            by_layer = {layer: kept for (key, layer, part), kept in self._stored.items() if (key, part) == (drive, name)}
            if sum(kept.chances is not None for kept in by_layer.values()) < 2:
                continue
            part = next(part for part in parts_of(self._cache, next(iter(by_layer))) if part.name == name)
            log10, words = min(_rates(reduce(add, by_layer.values()), slice(None), part.title))
            if log10 < _LIMIT:
                most = min(by_layer, key=lambda layer: min(_rates(by_layer[layer], slice(None), part.title))[0])
                detail = f"all layers together: {words}"
                found.append(Verdict(part.stage, "fault", -log10, -_LIMIT, detail, layer=most))
        for key, total in self._errors.items():
            share, verdict = _judge_errors(key[2], key[3], total)
            if key[1] is None and share > 1:
                detail = f"all layers together: {verdict.detail}"
                found.append(replace(verdict, detail=detail, layer=self._most(key)))
        return found

    def _most(self, key: _Key) -> int | None:
        """The layer that shows most of what all together show."""
        by_layer = {one[1]: errors for one, errors in self._errors.items() if one[1] is not None and one[2:] == key[2:]}
        return max(by_layer, key=lambda layer: _judge_errors(key[2], key[3], by_layer[layer])[0])

    def measured(self) -> tuple[Measured, ...]:
        """Every figure, for a table."""
        rows = []
        titles = {part.name: part for layer in self._cache.held for part in parts_of(self._cache, layer)}
        for (drive, layer, name), kept in sorted(self._stored.items(), key=lambda item: item[0][:2]):
            part, count = titles[name], float(kept.levels.sum())
            log10, _ = _rates(kept, slice(None), part.title)[0]
            rate = min(1.0, log10 / _LIMIT) if log10 else 0.0
            usual = expected(kept.chances.levels) if kept.chances else 0.0
            rows.append(Measured(drive, layer, part.stage, None, "ties", count, usual, rate))
            rows.append(Measured(drive, layer, part.stage, None, "length", float(kept.off.mean()), bounds.LENGTH_BIAS, None))
        for (drive, at, stage, name, head), total in self._errors.items():
            of_head = head if sum(key[:4] == (drive, at, stage, name) for key in self._errors) > 1 else None
            rows.append(Measured(drive, at, stage, of_head, name, total.gain, total.limit, total.share))
            if total.farther is not None:
                rows.append(
                    Measured(
                        drive, at, stage, of_head, "farther", total.farther, bounds.FARTHER, total.farther / bounds.FARTHER
                    )
                )
        return tuple(rows)


def _digests(fields: dict[str, Tensor]) -> Tensor:
    """[T] int64, of what fields [T, *] hold of each token."""
    rows = torch.cat([tensor.contiguous().flatten(1).view(torch.uint8) for tensor in fields.values()], 1).long()
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=generator)
    return (rows * factors).sum(1)


def _rates(kept: _Tokens, heads: slice, title: str) -> list[tuple[float, str]]:
    """log10 of the chance of so many vectors with other levels, and with another length; in words."""
    if kept.chances is None:
        return [(0.0, "")]
    found, total, chances = [], len(kept.levels), kept.chances[heads]
    where = f" of KV head {heads.start}" if heads.start is not None else ""
    for different, likely, what in (
        (kept.levels[:, heads], chances.levels, "other levels"), (kept.lengths[:, heads], chances.lengths, "another length"),
    ):  # fmt: skip
        count = int(different.sum())
        scaled = likely.repeat(1, -(-total // likely.shape[1]), 1)[:, : max(total, 1)]
        log10 = log10_of_so_many(count, scaled)
        words = (
            f"{count} of {different.numel()} vectors of {title}{where} are stored with {what}; rounding makes "
            f"{expected(scaled):.2g} differ, and so many with a chance below 1e{math.ceil(log10)}"
        )
        found.append((log10, words))
    return found


def _bias(kept: _Tokens, heads: slice, title: str) -> tuple[float, str]:
    """log10 of the chance that rounding moves the lengths so far one way; in words."""
    off = kept.off[:, heads]
    mean, log10 = float(off.mean()), one_sided(off.sum(-1), kept.alike)
    if not abs(mean) > bounds.LENGTH_BIAS:
        return 0.0, ""
    where = f" of KV head {heads.start}" if heads.start is not None else ""
    up = int((off > 0).sum())
    words = (
        f"vectors of {title}{where} are {abs(mean):.1e} too {'long' if mean > 0 else 'short'} on average: {up} longer, "
        f"{int((off < 0).sum())} shorter; rounding has no direction, the chance is below 1e{math.ceil(log10)}"
    )
    return log10, words


_SUBJECT = {
    "gain": "the result", "softmax scale": "the softmax scale", "attention": "attention", "MLP": "the MLP's part",
    "attention of a head": "attention of a KV head", "layer": "what the layer adds",
}  # fmt: skip


def _judge_errors(stage: str, name: str, total: Errors) -> tuple[float, Verdict]:
    """How far the sums are beyond what rounding explains: a share of the bound, and what to say of it."""
    share = total.share if math.isfinite(total.gain) else 0.0  # what is not finite is judged where it is compared
    if name in SLIPS:
        words = f"attention is off by {total.gain:.2f} times what {name} changes; rounding explains {total.limit:.1e}"
    else:
        words = f"{_SUBJECT[name]} is {abs(total.gain):.1e} too {'large' if total.gain > 0 else 'small'} on average"
        words = f"{words}; rounding explains {total.limit:.1e}"
    farther = total.farther
    if farther is not None and math.isfinite(farther) and total.samples >= _FEWEST and farther / bounds.FARTHER > share:
        share = farther / bounds.FARTHER
        words = f"{farther:.2f} times as far from the unrounded result as the reference is (bound {bounds.FARTHER:g}); {words}"
        return share, Verdict(stage, "fault", farther, bounds.FARTHER, words)
    return share, Verdict(stage, "fault", abs(total.gain), total.limit, words)
