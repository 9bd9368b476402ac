"""From what `--draft` says to a source of drafts: whether it fits is known before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from haarkv.engine.draft_models import ModelSource
from haarkv.engine.draft_mtp import MTPSource
from haarkv.engine.drafts import DraftSource, NgramSource
from haarkv.engine.plans import balanced_for, plan_for
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.models.base import rope_tables
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
from haarkv.tq_ops.weight import backing_tensor

NGRAM, MTP_LAYER = "ngram", "mtp"
MOST_TOKENS = 32
"""Drafted tokens a step at most: with the one before them they fit into any cache's chunk."""

OnProgram = Callable[[str], object]


@dataclass(frozen=True)
class DraftSpec:
    """A draft as it is asked for.

    Attributes:
        name: `ngram`, `mtp`, or a smaller model's name.
        tokens: drafted a step at most.
        kv: format of the draft's own cache; `tq4` unless given.
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
    executor: str
    device: str | None
    dtype: str
    ranks: Ranks
    balance: bool = True

    def refuses(self, config: ModelConfig, plan: KVPlan) -> str | None:
        """Why a draft of such a model and cache cannot run where this one runs, or None."""
        refusal = catalog.refusal(self.executor, config, [plan], ranks=self.ranks)
        return refusal and f"executor {refusal}"


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
    if target.ranks.size > 1:
        raise InputError("a draft model runs on one rank; take --draft ngram, or leave out --tensor-parallel")
    config = read_config(spec.name)
    _require_same_tokens(spec.name, config, target)
    plan = _draft_plan(spec, config, target)

    def load(executor: Executor) -> DraftSource:
        """A draft model beside the target's executor, which lends it what is the same."""
        shared_weights = {EMBEDDING: executor.weights.embedding, HEAD: executor.weights.lm_head}
        block_types = catalog.info(target.executor).block_types(target.device)
        draft_model = load_model(
            spec.name, target.dtype, progress=progress, shared_weights=shared_weights, keep_blocks=block_types
        )
        balanced_model = balanced_for(draft_model, plan, KVSpec(), target.balance).model
        weights = balanced_model.weights.to(executor.device)
        ropes, keeping = rope_tables(config, executor.device), balanced_model.config.for_drafts(spec.tokens)
        model = replace(balanced_model, config=keeping, weights=weights, ropes=ropes)
        drafting = catalog.create(target.executor, model, plan, target.device, on_program)
        shared = shared_bytes(drafting.weights, executor.weights)
        return ModelSource(name=spec.name, executor=drafting, plan=plan, shared_bytes=shared)

    return load


def _by_its_own_layer(spec: DraftSpec, target: Target, on_program: OnProgram | None) -> Callable[[Executor], DraftSource]:
    if target.ranks.size > 1:
        raise InputError("MTP runs on one rank; take --draft ngram, or leave out --tensor-parallel")
    if not has_mtp(target.name):
        raise InputError(
            f"{target.name} has no layer that predicts several tokens (MTP): a folder in Hugging Face format holds it as "
            "mtp.* tensors, a GGUF file as nextn.*; take --draft ngram, or leave out --draft"
        )
    config = config_of_mtp(target.config)
    plan = _draft_plan(spec, config, target)

    def load(executor: Executor) -> DraftSource:
        shared_weights = {EMBEDDING: executor.weights.embedding, HEAD: executor.weights.lm_head}
        block_types = catalog.info(target.executor).block_types(target.device)
        mtp = load_mtp(target.name, target.config, DTYPES[target.dtype], shared_weights, block_types).on(executor.device)
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
    example = next(token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token))
    their_id, our_id = (f"token {ids[example]}" if example in ids else "none" for ids in (theirs, ours))
    raise InputError(
        f"the draft {name} has another tokenizer: {example!r} is {their_id} there and {our_id} in {target.name}; "
        "take a smaller model of the same family"
    )


def _draft_plan(spec: DraftSpec, config: ModelConfig, target: Target) -> KVPlan:
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


def shared_bytes(weights: Weights, lender: Weights) -> int:
    """Bytes of embedding and head that are one memory in both."""
    lender_addresses = {backing_tensor(weight).data_ptr() for weight in (lender.embedding, lender.lm_head)}
    bytes_by_address = {backing_tensor(weight).data_ptr(): weight.nbytes for weight in (weights.embedding, weights.lm_head)}
    return sum(count for place, count in bytes_by_address.items() if place in lender_addresses)
