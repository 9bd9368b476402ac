"""Why is `gated_delta` wrong? Its parts are one op, and what it left tells them apart.

First: from which state did it go on? The formula runs from every state that lay there, from none, and from one that was lost
between pieces of a forward; the one that gives the executor's own state is what it read. Else one token's step is taken apart,

    S' = g S + k (b (v - g S^T k))^T

of the states S and S' before and after it. Across from k, S' is g S: that gives the decay, and what is left over says that k
is another. Along k it gives b; what is left over there says that v is another. k and v come of the convolution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from haarkv.validation import bounds
from haarkv.validation.layers.forward import MadeLayer
from haarkv.validation.layers.parts import load
from haarkv.validation.layers.record import Call
from haarkv.validation.layers.reference import Reference
from haarkv.validation.layers.report import Verdict
from haarkv.validation.layers.states import CONV, MEMORY, SEEN, STATE, Fields, begins, spoil, state_of
from haarkv.validation.layers.trial import Run

_FITS = 1e-2
"""How near the formula comes to a state that it explains, relative to each head's own length. Faults are far larger; a layer
that was run whole may differ by the roundings of its inputs in BF16."""
_PIECES = (16, 32, 64, 128, 256)
"""Tokens that kernels take at once: where one of these pieces ends, a state may be lost."""


@dataclass(frozen=True)
class _Parts:
    """What the formula makes of each of T tokens on the way, fp64: q, k [T, Hv, dk], v [T, Hv, dv], decay and beta [T, Hv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    def after(self, memory: Tensor, begin: int = 0, forget: int | None = None) -> Tensor:
        """The matrices [Hv, dk, dv] after all tokens from `begin` on; all zero before the token `forget`."""
        for t in range(begin, len(self.k)):
            memory = self.step(torch.zeros_like(memory) if t == forget else memory, t)
        return memory

    def step(self, memory: Tensor, t: int) -> Tensor:
        """The matrices after one token."""
        kept = memory * self.decay[t][:, None, None]
        change = (self.v[t] - (kept * self.k[t][..., None]).sum(1)) * self.beta[t][:, None]
        return kept + self.k[t][..., None] * change[:, None]


def of_sums(reference: Reference, call: Call, made: MadeLayer) -> Tensor:
    """How far FP32 sums may move each output S^T q of the op, [T, Hv] fp64: by a share of ||S|| ||q||.

    Its terms may nearly cancel; what is left is then off by more, relative to its own length, than any sum is.
    """
    sizes = []
    for sequence in range(len(made.batch.rows)):
        _, window, memory = _lying(reference, made, sequence)[0]
        parts = _parts(call, slice(*made.batch.query_start_loc[sequence : sequence + 2].tolist()), window, memory)
        for t in range(len(parts.k)):
            memory = parts.step(memory, t)
            sizes.append(memory.flatten(1).norm(dim=1) * parts.q[t].norm(dim=1))
    return bounds.DELTA_SUMS * torch.stack(sizes)


def explain_delta(reference: Reference, call: Call, made: MadeLayer, run: Run, verdicts: list[Verdict]) -> list[Verdict]:
    """The verdicts on a run of the op, or of a layer that holds it, with the first that fails put down to a part of it.

    Args:
        call: of the reference.
        made: the layer in which it was run.
        run: the executor's, of the op on the reference's inputs or of the whole layer.
    Returns:
        the same verdicts where no part can be told.
    """
    index = next((place for place, verdict in enumerate(verdicts) if verdict.fails), None)
    if index is None or STATE not in run.stored:
        return verdicts
    for sequence in range(len(made.batch.rows)):
        if (named := _of_sequence(reference, call, made, run.stored[STATE], sequence)) is not None:
            stage, words, head = named
            detail = f"{words}; {verdicts[index].detail}"
            return [*verdicts[:index], replace(verdicts[index], stage=stage, detail=detail, head=head), *verdicts[index + 1 :]]
    return verdicts


def explain_delta_layer(reference: Reference, made: MadeLayer, run: Run, verdict: Verdict) -> Verdict:
    """The verdict on a layer that is one program, with the stage of the delta rule that its state points to."""
    call = next((call for call in made.calls if call.op == "gated_delta"), None)
    if call is None:
        return verdict
    (found,) = explain_delta(reference, call, made, run, [verdict])
    if found is verdict:
        return verdict
    return replace(verdict, stages=(found.stage,), causes=(found.detail.split("; ", 1)[0],), head=found.head)


def _of_sequence(
    reference: Reference, call: Call, made: MadeLayer, left: Fields, sequence: int
) -> tuple[str, str, int | None] | None:
    """The stage that is wrong in one sequence, in words, and its head; None if the state is right or cannot be explained."""
    batch = made.batch
    end, begin = int(batch.seq_lens[sequence]), begins(batch)[sequence]
    states = {int(count): left[MEMORY][sequence, place].double() for place, count in enumerate(left[SEEN][sequence])}
    if end not in states or not torch.isfinite(states[end]).all():
        return None
    lying = _lying(reference, made, sequence)
    window, memory = lying[0][1:]
    token = slice(*batch.query_start_loc[sequence : sequence + 2].tolist())
    parts = _parts(call, token, window, memory)
    if _same(parts.after(memory), states[end]):
        return None
    if any(_same(old, states[end]) for _, _, old in lying):
        return "delta_state", f"sequence {sequence} is left with matrices that lay there before", None
    for words, old_window, old in lying[1:]:
        if _same(_parts(call, token, old_window, memory).after(old), states[end]):
            return "state_read", f"sequence {sequence} goes on from {words}, not from its own {begin} tokens", None
        if _same(parts.after(old), states[end]):
            return "state_read", f"the matrices of sequence {sequence} go on from {words}", None
        if _same(_parts(call, token, old_window, memory).after(memory), states[end]):
            return "state_read", f"the convolution of sequence {sequence} goes on from {words}", None
    for size in _PIECES:
        last = (end - begin - 1) // size * size
        if last and _same(parts.after(memory, last, forget=last), states[end]):
            return "delta_state", f"the state of sequence {sequence} is lost between pieces of {size} tokens", None
    before = {begin: memory} | {count: state for count, state in states.items() if begin < count <= end}
    for count in sorted(before):
        if count + 1 in states and count < end:
            named = _apart(before[count], states[count + 1], parts, count - begin)
            if named is not None:
                return named
    return None


def _lying(reference: Reference, made: MadeLayer, sequence: int) -> list[tuple[str, Tensor, Tensor]]:
    """What a run found in the cache, in words, with windows and matrices: the right state, then all others, then none."""
    cache, row = reference.cache.empty_like(reference.cache.device), int(made.batch.rows[sequence])
    load(cache, made.index, made.before)
    state, begin = state_of(cache, made.index), begins(made.batch)[sequence]
    assert state is not None
    spoil(state, made.batch)
    windows, memories = state.tensors[CONV][row].double(), state.tensors[MEMORY][row].double()
    nothing = torch.zeros_like(windows[0]), torch.zeros_like(memories[0])
    right: tuple[str, Tensor, Tensor] = ("nothing", *nothing)
    others = []
    for place, count in enumerate(state.seen[row].tolist()):
        if count == begin > 0:
            right = (f"{count} tokens", windows[place], memories[place])
        else:
            of = f"{count} tokens, which were taken back or are too few" if begin else "a sequence that has ended"
            others.append((f"the state of {of}", windows[place], memories[place]))
    return [right, *others, ("nothing, its state cut off", *nothing)]


def _parts(call: Call, token: slice, window: Tensor, memory: Tensor) -> _Parts:
    x, a, b, conv, a_log, dt_bias = (tensor.double() for tensor in call.args[:6])
    heads, key_dim, value_dim = memory.shape
    taps, whole = conv.shape[-1], torch.cat([window, x[token]])
    mixed = functional.silu(sum((whole[t : len(whole) - taps + 1 + t] * conv[:, 0, t] for t in range(taps)), torch.zeros(())))
    keys = (mixed.shape[1] - heads * value_dim) // 2
    q, k, v = (part.reshape(len(part), -1, dim) for part, dim in zip(
        torch.split(mixed, [keys, keys, heads * value_dim], 1), (key_dim, key_dim, value_dim), strict=True))  # fmt: skip
    q, k = (
        (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(heads // part.shape[1], 1)
        for part in (q, k)
    )
    decay = torch.exp(-a_log.exp() * functional.softplus(a[token] + dt_bias))
    return _Parts(q / key_dim**0.5, k, v, decay, torch.sigmoid(b[token]))


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether each head of one is the other's [Hv, dk, dv]."""
    return bool(((theirs - ours).flatten(1).norm(dim=1) <= _FITS * theirs.flatten(1).norm(dim=1)).all())


def _apart(before: Tensor, after: Tensor, parts: _Parts, t: int) -> tuple[str, str, int | None] | None:
    """What is wrong with the step of token t of a forward; None if nothing is."""
    named = dict(_of_heads(before, after, parts, t))
    if not named:
        return None
    stage = Counter(stage for stage, _ in named.values()).most_common(1)[0][0]
    wrong = {head: words for head, (of, words) in named.items() if of == stage}
    head = next(iter(wrong)) if len(wrong) == 1 < len(before) else None
    return stage, next(iter(wrong.values())), head


def _of_heads(before: Tensor, after: Tensor, parts: _Parts, t: int) -> Iterator[tuple[int, tuple[str, str]]]:
    """Each wrong head of V, with the stage and words."""
    right = parts.after(before, t) if t == len(parts.k) - 1 else replace(parts, k=parts.k[: t + 1]).after(before, t)
    for head in range(len(before)):
        old, new, k = before[head], after[head], parts.k[t, head]
        if _same(right[head][None], new[None]):
            continue
        unit = k / k.norm()  # a short k is not made a unit vector
        across_old, across_new = (x - torch.outer(unit, unit @ x) for x in (old, new))
        size = float(across_old.square().sum())
        kept = float((across_old * across_new).sum()) / size if size else 0.0
        if float((across_new - kept * across_old).norm()) > _FITS * float(new.norm()):
            yield head, ("convolution", f"head {head}: what was written is not along its k")
            continue
        decay, beta = float(parts.decay[t, head]), float(parts.beta[t, head])
        if size and abs(kept - decay) * size**0.5 > _FITS * float(new.norm()) / 2:
            yield (
                head,
                ("decay", f"head {head} keeps {kept:.4f} of its state, not {decay:.4f}{_whose(kept, parts.decay[t], head)}"),
            )
            continue
        wanted, written = parts.v[t, head] - decay * (k @ old), (k @ new - decay * (k @ old)) / k.square().sum()
        share = float((wanted * written).sum() / wanted.square().sum())
        if float((written - share * wanted).norm()) > _FITS * float(written.norm()):
            yield head, ("convolution", f"head {head}: what was written is not its v")
        else:
            yield (
                head,
                ("beta", f"head {head} writes {share:.4f} of what is new, not {beta:.4f}{_whose(share, parts.beta[t], head)}"),
            )


def _whose(found: float, values: Tensor, head: int) -> str:
    """Whether a number is another head's."""
    others: Sequence[int] = [other for other in range(len(values)) if other != head]
    near = [other for other in others if abs(found - float(values[other])) <= bounds.DELTA + _FITS * abs(found)]
    return f"; head {near[0]} does so" if len(near) == 1 else ""
