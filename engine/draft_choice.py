"""From what `--draft` says to a draft: whether it fits is known before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.engine.draft_models import ModelDraft
from haarkv.engine.drafts import Draft, Ngram, require_draft_tokens
from haarkv.engine.plans import balanced_for, plan_for
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.models.base import tables_of
from haarkv.models.catalog import load_model, read_config
from haarkv.models.checkpoint import Progress
from haarkv.models.config import ModelConfig
from haarkv.models.parallel import Ranks
from haarkv.models.text import load_tokenizer
from haarkv.models.weights import EMBEDDING, HEAD, Weights
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec

SELF, NGRAM = "self", "ngram"
SELF_TAIL, SELF_SINK = 64, 4
"""Tokens that a coarser copy keeps in BF16, where the executor can: the newest, and the first."""

OnProgram = Callable[[str], object]


@dataclass(frozen=True)
class DraftSpec:
    """A draft as it is asked for.

    Attributes:
        name: `ngram`, `self`, or a smaller model's name.
        tokens: drafted a step at most.
        kv: format of the draft's own cache; None for the coarsest that there is of `self`, and `tq4` of a model.
    """

    name: str
    tokens: int = 4
    kv: str | None = None

    def __post_init__(self) -> None:
        require_draft_tokens(self.tokens)
        if self.kv is not None and self.name == NGRAM:
            raise InputError("ngram has no cache; leave out --draft-kv")
        if self.kv is not None and formats.needs_calibration(self.kv):
            raise InputError(f"a draft has no learned coordinates; {self.kv} cannot be its format")


@dataclass(frozen=True)
class Drafted:
    """The model that a draft is for.

    Attributes:
        name: as `load` was given it.
        config, plan: of what is run here.
        executor, device, dtype: where and as what, in the catalog's words.
    """

    name: str
    config: ModelConfig
    plan: KVPlan
    executor: str
    device: str | None
    dtype: str
    ranks: Ranks
    balance: bool = True


def choose(
    spec: DraftSpec, model: Drafted, progress: Progress | None = None, on_program: OnProgram | None = None
) -> Callable[[Executor], Draft]:
    """What makes the draft once the model's executor is there.

    Raises:
        InputError: no such model, another tokenizer, or a cache that the executor does not read; now, or as it is made.
    """
    if spec.name == NGRAM:
        return lambda _: Ngram()
    if spec.name == SELF:
        if model.config.state_shapes:
            raise InputError(
                "--draft self copies K and V, and this model has layers with a recurrent state; take --draft ngram"
            )
        plan = _coarser(spec.kv, model)
        return lambda executor: ModelDraft(SELF, executor, plan, executor.weights.nbytes, copies=True)
    if model.ranks.size > 1:
        raise InputError("a draft model runs on one rank; take --draft ngram or self, or leave out --tensor-parallel")
    config = read_config(spec.name)
    _require_same_tokens(spec.name, config, model)
    kept = _plan_of(spec, config, model)
    return lambda executor: _loaded(spec, config, kept, model, executor, progress, on_program)


# -- The model itself --------------------------------------------------------------------------------------------------------


def _coarser(kv: str | None, model: Drafted) -> KVPlan:
    """The plan of a coarser copy: the fewest bytes of what the executor reads, with the newest tokens in BF16 if it can."""
    shapes = model.config.kv_shapes
    reasons: list[str] = []
    for plan in _plans(kv, model.config):
        if plan.bytes_per_token(shapes) >= model.plan.bytes_per_token(shapes):
            break
        if (reason := _refused(model, model.config, plan)) is None:
            return plan
        reasons.append(reason)
    if kv is not None and reasons:
        raise InputError(f"--draft self cannot keep its copy in {kv}: {reasons[-1]}")
    if kv is not None:
        raise InputError(f"--draft self needs a copy coarser than the cache, {model.plan.describe()}, and {kv} is not")
    raise InputError(
        f"executor {model.executor} reads no format coarser than {model.plan.describe()} for --draft self; "
        "take --draft ngram, or a larger cache"
    )


def _plans(kv: str | None, config: ModelConfig) -> Iterator[KVPlan]:
    """Plans of one format, those of fewer bytes first, each with tokens in BF16 and then without."""
    alone = filter(_stands_alone, formats.names())
    names = [kv] if kv is not None else sorted(alone, key=lambda name: _bytes_of(name, config))
    for name in names:
        for spec in (KVSpec(name, tail=SELF_TAIL, sink=SELF_SINK), KVSpec(name)):
            try:
                yield plan_for(spec, config)
            except InputError:
                if kv is not None and spec.tail is None:
                    raise


def _stands_alone(name: str) -> bool:
    return all(of.group_tokens == 1 for of in formats.parse(name))


def _bytes_of(name: str, config: ModelConfig) -> float:
    try:
        plan = KVSpec(name).plan(config.num_layers)
        return plan.bytes_per_token(config.kv_shapes) + plan.ring_bytes(config.kv_shapes, 1)
    except InputError:  # it has no layout for this head_dim
        return float("inf")


def _refused(model: Drafted, config: ModelConfig, plan: KVPlan) -> str | None:
    try:
        catalog.check(model.executor, config, plan, model.device, model.ranks)
    except InputError as error:
        return str(error)
    return None


# -- A smaller model ---------------------------------------------------------------------------------------------------------


def _require_same_tokens(name: str, config: ModelConfig, model: Drafted) -> None:
    ours, theirs = (load_tokenizer(*of).vocabulary() for of in ((model.name, model.config), (name, config)))
    if ours == theirs:
        return
    apart = next(token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token))
    there, here = (f"token {ids[apart]}" if apart in ids else "none" for ids in (theirs, ours))
    raise InputError(
        f"the draft {name} has another tokenizer: {apart!r} is {there} there and {here} in {model.name}; "
        "take a smaller model of the same family"
    )


def _plan_of(spec: DraftSpec, config: ModelConfig, model: Drafted) -> KVPlan:
    """The plan of a draft's own cache."""
    names, reason = (("tq4", "bf16") if spec.kv is None else (spec.kv,)), ""
    for name in names:
        try:
            plan = plan_for(KVSpec(name), config)
        except InputError as error:
            reason = str(error)
            continue
        if (refused := _refused(model, config, plan)) is None:
            return plan
        reason = refused
    raise InputError(f"the draft {spec.name} cannot run: {reason}")


def _loaded(
    spec: DraftSpec, config: ModelConfig, plan: KVPlan, model: Drafted, executor: Executor, progress: Progress | None,
    on_program: OnProgram | None,
) -> Draft:  # fmt: skip
    """A draft model beside the model's executor, which lends it what is the same."""
    lent = {EMBEDDING: executor.weights.embedding, HEAD: executor.weights.lm_head}
    loaded = load_model(spec.name, model.dtype, progress=progress, lent=lent)
    balanced = balanced_for(loaded, plan, KVSpec(), model.balance).model
    weights = _sharing(balanced.weights, executor.weights).to(executor.device)
    of = replace(balanced, weights=weights, ropes=tables_of(config, executor.device))
    made = catalog.create(model.executor, of, plan, model.device, on_program)
    return ModelDraft(spec.name, made, plan, shared_bytes(made.weights, executor.weights))


def _sharing(weights: Weights, of: Weights) -> Weights:
    """A draft's weights, with the model's own embedding and head where all their bytes agree."""

    def one(tensor: Tensor, candidates: Mapping[str, Tensor]) -> Tensor:
        return next((other for other in candidates.values() if _equal(tensor, other)), tensor)

    there = {EMBEDDING: of.embedding, HEAD: of.lm_head}
    embedding = one(weights.embedding, there)
    tied = weights.lm_head is weights.embedding
    return replace(weights, embedding=embedding, lm_head=embedding if tied else one(weights.lm_head, there))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.to(b.device), b)


def shared_bytes(weights: Weights, of: Weights) -> int:
    """Bytes of embedding and head that are one memory in both."""
    held = {tensor.data_ptr() for tensor in (of.embedding, of.lm_head)}
    own = {tensor.data_ptr(): tensor.nbytes for tensor in (weights.embedding, weights.lm_head)}
    return sum(count for place, count in own.items() if place in held)
