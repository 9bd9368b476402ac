"""How far apart two predictions of a text lie, position by position; and what is kept of them for another run to go on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from reprlib import repr as shown
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.input_files import parse_json
from haarkv.tq_ops.kv.safetensors_header import digest_of, metadata_of

# Logits that are scored at a time: float64 copies of a whole window's would take gigabytes with a large vocabulary, and larger
# slices than this fall out of the CPU's cache.
_SLICE = 2**17


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Kullback-Leibler divergence in nats: `KL(P || Q) = sum_i p_i (log p_i - log q_i)`.

    Args:
        log_p, log_q: [..., vocab] float64, as `log_softmax` gives them.
    Returns:
        [...] float64, at least 0.
    """
    # Rounding leaves equal distributions a few 1e-17 below nothing.
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0.0)


def nearest_rank(values: Sequence[float], permille: int) -> float:
    """The smallest of `values`, ascending and at least one, that at least so many thousandths of them do not exceed."""
    return values[-(-permille * len(values) // 1000) - 1]


@dataclass(frozen=True)
class Scores:
    """What A and B predict at N positions of a text whose next tokens are known.

    Attributes:
        kl: [N] float64, KL(A || B) in nats.
        same_top: [N] bool, whether both like the same token best, the lower id where logits are equal.
        log_p_a, log_p_b: [N] float64, what each gives the token that really follows, in nats.
    """

    kl: Tensor
    same_top: Tensor
    log_p_a: Tensor
    log_p_b: Tensor

    def __len__(self) -> int:
        return len(self.kl)


def join(parts: Sequence[Scores]) -> Scores:
    """The positions of several, one after the other."""
    return Scores(**{name: torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])})


def score_text(a: Tensor, b: Tensor, targets: Tensor) -> Scores:
    """Compare two predictions at each position of a text, in float64.

    Args:
        a, b: logits [N, vocab], any float dtype and device.
        targets: [N] int64, the tokens that really follow.
    Returns:
        on the CPU.
    Raises:
        ValueError: shapes that do not fit together.
        NonFiniteError: a logit is infinite or NaN.
    """
    if a.shape != b.shape or a.ndim != 2 or targets.shape != a.shape[:1]:
        raise ValueError(f"logits are [N, vocab] and targets [N], not {[list(x.shape) for x in (a, b, targets)]}")
    rows = max(1, _SLICE // a.shape[1])
    parts = zip(*(torch.split(x.to(a.device), rows) for x in (a, b, targets)), strict=True)
    return join([_score_slice(*part) for part in parts])


def require_finite(a: Tensor, b: Tensor) -> None:
    """Refuse logits of two sides that are not finite, by NonFiniteError."""
    for name, logits in (("A", a), ("B", b)):
        if not torch.isfinite(torch.stack(logits.aminmax())).all():  # faster than asking each
            raise NonFiniteError(f"side {name} gave a logit that is {logits[~torch.isfinite(logits)][0].item()}")


def _score_slice(a: Tensor, b: Tensor, targets: Tensor) -> Scores:
    require_finite(a, b)
    log_p, log_q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    actual = targets.unsqueeze(-1)
    return Scores(
        kl=kl_divergence(log_p, log_q).cpu(),
        same_top=torch.from_numpy(_first_best(a) == _first_best(b)),
        log_p_a=log_p.gather(-1, actual).squeeze(-1).cpu(),
        log_p_b=log_q.gather(-1, actual).squeeze(-1).cpu(),
    )


def _first_best(logits: Tensor) -> NDArray[np.intp]:
    """Id of the largest logit of each row, the lowest where several are: NumPy promises that, `Tensor.argmax` does not."""
    best: NDArray[np.intp] = logits.float().cpu().numpy().argmax(-1)
    return best


# -- What is kept of a run ------------------------------------------------------------------------------------------------
_KIND, _VERSION = "haarkv_eval", "3"
# Rewriting a file of some megabytes after each window of each cache would cost more than the windows.
_SAVE_EVERY_S = 10.0
T = TypeVar("T")


class Partial:
    """Scores of windows and greedy matches, by cache, bit for bit: what an evaluation has done so far.

    Args:
        content: what an earlier run has saved; None begins anew.
        run: what both runs must have in common, by a word for the user.
        caches: fingerprint of each cache that this run will ask for.
        save: takes the whole content, every ten seconds at most, and in the end.
    Raises:
        InputError: a content that is no partial result, or one of another run; it is left alone.
    """

    def __init__(
        self,
        content: bytes | None = None,
        run: Mapping[str, str] | None = None,
        caches: Mapping[str, str] | None = None,
        save: Callable[[bytes], None] | None = None,
    ) -> None:
        self._run, self._save, self._unsaved, self._saved_at = dict(run or {}), save, False, time.monotonic()
        self._tensors: dict[str, Tensor] = {}
        self._caches: dict[str, dict[str, Any]] = {}
        if content is not None:
            self._caches, self._tensors = resumed_from(
                content, _KIND, _VERSION, self._run, "partial result of such a run",
                lambda metadata, tensors: (parse_json(metadata["caches"]), tensors),
            )  # fmt: skip
        for name, fingerprint in (caches or {}).items():
            if self._caches.setdefault(name, {"fingerprint": fingerprint})["fingerprint"] != fingerprint:
                raise InputError(f"--resume: its {name} had other code or tables; begin a new file")

    def scores(self, name: str, window: int) -> Scores | None:
        found = {field.name: self._tensors.get(f"{window} {field.name} {name}") for field in fields(Scores)}
        return None if None in found.values() else Scores(**cast(dict[str, Tensor], found))

    def keep_scores(self, name: str, window: int, scores: Scores) -> None:
        self._tensors |= {f"{window} {field} {name}": tensor for field, tensor in vars(scores).items()}
        self._changed()

    def matches(self, name: str) -> list[int] | None:
        return self._caches.get(name, {}).get("matches")

    def keep_matches(self, name: str, matches: list[int]) -> None:
        self._caches.setdefault(name, {})["matches"] = matches
        self._changed()

    def flush(self) -> None:
        if self._save and self._unsaved:
            self._save(resumable(_KIND, _VERSION, self._run, self._tensors, {"caches": json.dumps(self._caches)}))
            self._unsaved, self._saved_at = False, time.monotonic()

    def _changed(self) -> None:
        self._unsaved = True
        if time.monotonic() - self._saved_at >= _SAVE_EVERY_S:
            self.flush()


def resumable(
    kind: str, version: str, run: Mapping[str, str], tensors: Mapping[str, Tensor], about: Mapping[str, str]
) -> bytes:
    """The bytes of a file from which another run goes on, with a digest of all of it.

    Args:
        kind: the name of its version.
        run: what another run must have in common with this one, by a word for the user.
        about: what it holds beside tensors, each as JSON.
    """
    metadata = {kind: version, "run": json.dumps(dict(run)), **about}
    content: bytes = save(dict(tensors), metadata | {"sha256": digest_of(tensors, metadata)})
    return content


def resumed_from(
    content: bytes, kind: str, version: str, run: Mapping[str, str], what: str,
    parse: Callable[[Mapping[str, str], dict[str, Tensor]], T],
) -> T:  # fmt: skip
    """What `parse` makes of the metadata and tensors of such a file.

    Args:
        what: such files are, in words.
    Raises:
        InputError: bytes that are none of this, or of another run, or damaged.
    """
    try:
        metadata, tensors = metadata_of(content), load(content)
        if (found := metadata[kind]) != version:
            raise InputError(f"--resume: the file is of version {shown(found)}, not {version}; begin a new one")
        if digest_of(tensors, {key: value for key, value in metadata.items() if key != "sha256"}) != metadata["sha256"]:
            raise InputError("--resume: the file is damaged; begin a new one")
        before, parsed = parse_json(metadata["run"]), parse(metadata, tensors)
        another = next((word for word, value in run.items() if before.get(word) != value), None)
    except InputError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"--resume: the file is no {what}; begin a new one") from None
    if another:
        raise InputError(f"--resume: the file was begun with another {another}; begin a new one")
    return parsed
