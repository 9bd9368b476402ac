"""From what `--draft` says to a source of drafts: whether it fits is known before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from haarkv.engine.draft_models import ModelSource
from haarkv.engine.draft_mtp import MTPSource
from haarkv.engine.drafts import DraftSource, NgramSource
from haarkv.engine.plans import balanced_for, plan_for
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.models.base import tables_of
from haarkv.models.catalog import DTYPES, load_model, read_config
from haarkv.models.checkpoint import Progress
from haarkv.models.config import ModelConfig
from haarkv.models.mtp import config_of_mtp, has_mtp, load_mtp
from haarkv.models.parallel import Ranks
from haarkv.models.text import load_tokenizer
from haarkv.models.weights import EMBEDDING, HEAD, Weights
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.tq_ops.weight import Weight, memory_of

SELF, NGRAM, MTP_LAYER = "self", "ngram", "mtp"
SELF_TAIL, SELF_SINK = 64, 4
"""Tokens that a coarser copy keeps in BF16, where the executor can: the newest, and the first."""
MOST_TOKENS = 32
"""Drafted tokens a step at most: with the one before them they fit into any cache's chunk."""

OnProgram = Callable[[str], object]


@dataclass(frozen=True)
class DraftSpec:
    """A draft as it is asked for.

    Attributes:
        name: `ngram`, `self`, `mtp`, or a smaller model's name.
        tokens: drafted a step at most.
        kv: format of the draft's own cache; None for the coarsest that there is of `self`, and `tq4` of a model.
    """

    name: str
    tokens: int = 4
    kv: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MOST_TOKENS:
            raise InputError(f"draft tokens must lie in 1 … {MOST_TOKENS}, not {self.tokens}")
        if self.kv is not None and self.name == NGRAM:
            raise InputError("ngram has no cache; leave out --draft-kv")
        if self.kv is not None and formats.needs_calibration(self.kv):
            raise InputError(f"a draft has no learned coordinates; {self.kv} cannot be its format")


@dataclass(frozen=True)
class Target:
    """The model that a draft is for.

    Attributes:
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

    def refuses(self, config: ModelConfig, plan: KVPlan) -> str | None:
        """Why a draft of such a model and cache cannot run where this one runs, or None."""
        refused = catalog.refusal(self.executor, config, [plan], ranks=self.ranks)
        return refused and f"executor {refused}"


def choose(
    spec: DraftSpec, target: Target, progress: Progress | None = None, on_program: OnProgram | None = None
) -> Callable[[Executor], DraftSource]:
    """What makes the draft once the target's executor is there.

    Raises:
        InputError: no such model, another tokenizer, or a cache that the executor does not read; now, or as it is made.
    """
    if spec.name == NGRAM:
        return lambda _: NgramSource()
    if spec.name == MTP_LAYER:
        return _by_its_own_layer(spec, target, on_program)
    if spec.name == SELF:
        if target.config.state_shapes:
            raise InputError(
                "--draft self copies K and V, and this model has layers with a recurrent state; take --draft mtp or ngram"
            )
        plan = _coarser(spec.kv, target)
        return lambda executor: ModelSource(
            name=SELF, executor=executor, plan=plan, shared_bytes=executor.weights.nbytes, copies=True
        )
    if target.ranks.size > 1:
        raise InputError("a draft model runs on one rank; take --draft ngram or self, or leave out --tensor-parallel")
    config = read_config(spec.name)
    _require_same_tokens(spec.name, config, target)
    plan = _plan_of(spec, config, target)

    def load(executor: Executor) -> DraftSource:
        """A draft model beside the target's executor, which lends it what is the same."""
        lent = {EMBEDDING: executor.weights.embedding, HEAD: executor.weights.lm_head}
        kept = catalog.info(target.executor).block_types(target.device)
        loaded = load_model(spec.name, target.dtype, progress=progress, lent=lent, keep_blocks=kept)
        balanced = balanced_for(loaded, plan, KVSpec(), target.balance).model
        weights = _sharing(balanced.weights, executor.weights).to(executor.device)
        ropes, keeping = tables_of(config, executor.device), balanced.config.for_drafts(spec.tokens)
        model = replace(balanced, config=keeping, weights=weights, ropes=ropes)
        drafting = catalog.create(target.executor, model, plan, target.device, on_program)
        shared = shared_bytes(drafting.weights, executor.weights)
        return ModelSource(name=spec.name, executor=drafting, plan=plan, shared_bytes=shared)

    return load


# -- The model itself --------------------------------------------------------------------------------------------------------


def _coarser(kv: str | None, target: Target) -> KVPlan:
    """The plan of a coarser copy: the fewest bytes of what the executor reads, with the newest tokens in BF16 if it can."""
    shapes = target.config.kv_shapes
    reasons: list[str] = []
    for plan in _plans(kv, target.config):
        if plan.bytes_per_token(shapes) >= target.plan.bytes_per_token(shapes):
            break
        if (reason := target.refuses(target.config, plan)) is None:
            return plan
        reasons.append(reason)
    if kv is not None and reasons:
        raise InputError(f"--draft self cannot keep its copy in {kv}: {reasons[-1]}")
    if kv is not None:
        raise InputError(f"--draft self needs a copy coarser than the cache, {target.plan.describe()}, and {kv} is not")
    raise InputError(
        f"executor {target.executor} reads no format coarser than {target.plan.describe()} for --draft self; "
        "take --draft ngram, or a larger cache"
    )


def _plans(kv: str | None, config: ModelConfig) -> Iterator[KVPlan]:
    """Plans of one format, those of fewer bytes first, each with tokens in BF16 and then without."""

    def bytes_of(name: str) -> float:
        try:
            plan = KVSpec(name).plan(config.num_layers)
            return plan.bytes_per_token(config.kv_shapes) + plan.ring_bytes(config.kv_shapes, 1)
        except InputError:  # it has no layout for this head_dim
            return float("inf")

    ours = [name for name in formats.names() if not formats.get(name).to_compare]
    for name in [kv] if kv is not None else sorted(ours, key=bytes_of):
        for spec in (KVSpec(name, tail=SELF_TAIL, sink=SELF_SINK), KVSpec(name)):
            try:
                yield plan_for(spec, config)
            except InputError:
                if kv is not None and spec.tail is None:
                    raise


def _by_its_own_layer(spec: DraftSpec, target: Target, on_program: OnProgram | None) -> Callable[[Executor], DraftSource]:
    if target.ranks.size > 1:
        raise InputError("MTP runs on one rank; take --draft ngram, or leave out --tensor-parallel")
    if not has_mtp(target.name):
        raise InputError(
            f"{target.name} has no layer that predicts several tokens (MTP): a folder in Hugging Face format holds it as "
            "mtp.* tensors, a GGUF file as nextn.*; take --draft ngram, or leave out --draft"
        )
    config = config_of_mtp(target.config)
    plan = _plan_of(spec, config, target)

    def load(executor: Executor) -> DraftSource:
        lent = {EMBEDDING: executor.weights.embedding, HEAD: executor.weights.lm_head}
        kept = catalog.info(target.executor).block_types(target.device)
        mtp = load_mtp(target.name, target.config, DTYPES[target.dtype], lent, kept).on(executor.device)
        running = catalog.create(target.executor, mtp.model, plan, target.device, on_program)
        if running.ops is None or executor.ops is None:
            raise InputError(f"executor {target.executor} does not run MTP; take --executor cpu, or --draft ngram")
        shared = shared_bytes(running.weights, executor.weights)
        return MTPSource(mtp=mtp, executor=running, plan=plan, target=executor, shared_bytes=shared)

    return load


# -- A smaller model ---------------------------------------------------------------------------------------------------------


def _require_same_tokens(name: str, config: ModelConfig, target: Target) -> None:
    ours, theirs = (load_tokenizer(*model).vocabulary() for model in ((target.name, target.config), (name, config)))
    if ours == theirs:
        return
    apart = next(token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token))
    there, here = (f"token {ids[apart]}" if apart in ids else "none" for ids in (theirs, ours))
    raise InputError(
        f"the draft {name} has another tokenizer: {apart!r} is {there} there and {here} in {target.name}; "
        "take a smaller model of the same family"
    )


def _plan_of(spec: DraftSpec, config: ModelConfig, target: Target) -> KVPlan:
    """The plan of a draft's own cache."""
    reason = None
    for name in ("tq4", "bf16") if spec.kv is None else (spec.kv,):
        try:
            plan = plan_for(KVSpec(name), config)
            if (reason := target.refuses(config, plan)) is None:
                return plan
        except InputError as error:
            reason = str(error)
    raise InputError(f"the draft {spec.name} cannot run: {reason}")


def _sharing(weights: Weights, lender: Weights) -> Weights:
    """A draft's weights, with the target's own embedding and head where all their bytes agree."""

    def shared(weight: Weight) -> Weight:
        for other in (lender.embedding, lender.lm_head):
            alike = type(weight) is type(other) and weight.shape == other.shape and weight.dtype == other.dtype
            if alike and torch.equal(memory_of(weight).to(other.device), memory_of(other)):
                return other
        return weight

    embedding = shared(weights.embedding)
    tied = weights.lm_head is weights.embedding
    return replace(weights, embedding=embedding, lm_head=embedding if tied else shared(weights.lm_head))


def shared_bytes(weights: Weights, lender: Weights) -> int:
    """Bytes of embedding and head that are one memory in both."""
    lent = {memory_of(weight).data_ptr() for weight in (lender.embedding, lender.lm_head)}
    held = {memory_of(weight).data_ptr(): weight.nbytes for weight in (weights.embedding, weights.lm_head)}
    return sum(count for place, count in held.items() if place in lent)
