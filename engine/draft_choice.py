"""From `--draft` to a draft source; whether it fits is checked before weights are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from haarkv.engine.drafters import ModelSource, MTPSource
from haarkv.engine.drafts import Drafter, DraftRun, DraftSource
from haarkv.engine.plans import balanced_for, plan_for
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.models.catalog import DTYPES, load_model, read_config
from haarkv.models.checkpoint import Progress
from haarkv.models.config import ModelConfig
from haarkv.models.mtp import config_of_mtp, has_mtp, load_mtp
from haarkv.models.parallel import Ranks
from haarkv.models.text import load_tokenizer
from haarkv.models.weights import EMBEDDING, HEAD
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec

NGRAM, MTP_LAYER = "ngram", "mtp"
LONGEST_MATCH, SHORTEST_MATCH = 8, 2
"""Tokens at the end of a text that `ngram` looks up."""
MOST_TOKENS = 32
"""Drafted tokens a step at most: with the token before them they fit into every cache's chunk."""


@dataclass(frozen=True)
class DraftSpec:
    """A requested draft: `ngram`, `mtp` or a model's name, most tokens a step, and its cache format (`tq4` unless given)."""

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
    """The model to draft for; executor, device and dtype by the catalog's names."""

    name: str
    config: ModelConfig
    executor: str
    device: str | None
    dtype: str
    ranks: Ranks
    balance: bool = True


def choose(
    spec: DraftSpec, target: Target, progress: Progress | None = None, on_program: catalog.OnProgram | None = None
) -> Callable[[Executor], DraftSource]:
    """A function from the target's executor to its draft source.

    Raises:
        InputError: no such model, another tokenizer, or a cache that the executor does not read.
    """
    if spec.name == NGRAM:
        return lambda _: NgramSource()
    if target.ranks.size > 1:
        raise InputError(f"the draft {spec.name} runs on one rank; take --draft ngram, or leave out --tensor-parallel")
    config = _mtp_config(target) if spec.name == MTP_LAYER else _model_config(spec.name, target)
    plan = _draft_plan(spec, config, target)
    block_types = catalog.info(target.executor).block_types(target.device)
    run = partial(catalog.create, target.executor, plan=plan, device=target.device, on_program=on_program)

    def load(executor: Executor) -> DraftSource:
        shared_weights = {EMBEDDING: executor.weights.embedding, HEAD: executor.weights.lm_head}
        if spec.name == MTP_LAYER:
            mtp = load_mtp(target.name, target.config, DTYPES[target.dtype], shared_weights, block_types).on(executor.device)
            running = run(model=mtp.model)
            if running.ops is None or executor.ops is None:
                raise InputError(f"executor {target.executor} does not run MTP; take --executor cpu, or --draft ngram")
            return MTPSource(mtp=mtp, executor=running, plan=plan, target=executor)
        draft_model = load_model(
            spec.name, target.dtype, progress=progress, shared_weights=shared_weights, keep_blocks=block_types
        )
        balanced_model, _ = balanced_for(draft_model, plan, KVSpec(), target.balance)
        model = replace(balanced_model.to(executor.device), config=config.for_drafts(spec.tokens))
        return ModelSource(name=spec.name, executor=run(model=model), plan=plan)

    return load


def _mtp_config(target: Target) -> ModelConfig:
    if not has_mtp(target.name):
        raise InputError(
            f"{target.name} has no layer that predicts several tokens (MTP): a folder in Hugging Face format holds it as "
            "mtp.* tensors, a GGUF file as nextn.*; take --draft ngram, or leave out --draft"
        )
    return config_of_mtp(target.config)


def _model_config(name: str, target: Target) -> ModelConfig:
    """The config of a smaller model, which must have the target's tokens."""
    config = read_config(name)
    ours, theirs = (load_tokenizer(*model).vocabulary() for model in ((target.name, target.config), (name, config)))
    if ours == theirs:
        return config
    example = next(token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token))
    their_id, our_id = (f"token {ids[example]}" if example in ids else "none" for ids in (theirs, ours))
    raise InputError(
        f"the draft {name} has another tokenizer: {example!r} is {their_id} there and {our_id} in {target.name}; "
        "take a smaller model of the same family"
    )


def _draft_plan(spec: DraftSpec, config: ModelConfig, target: Target) -> KVPlan:
    reason = ""
    for name in ("tq4", "bf16") if spec.kv is None else (spec.kv,):
        try:
            plan = plan_for(KVSpec(name), config)
            catalog.check(target.executor, config, plan, target.device, target.ranks)
            return plan
        except InputError as error:
            reason = str(error)
    raise InputError(f"the draft {spec.name} cannot run: {reason}")


# -- The text itself ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NgramSource(DraftSource):
    """Prompt lookup: what followed the last occurrence of the text's newest tokens."""

    name: str = "ngram"

    def drafter(self, run: DraftRun) -> Drafter:
        return _NgramDrafter(run)


class _NgramDrafter(Drafter):
    def __init__(self, run: DraftRun) -> None:
        # Room for the texts to grow, so that a step adds its few tokens and copies none.
        self._tokens = [np.zeros(run.max_context + 1, dtype=np.int64) for _ in run.prompts]
        self._lengths = [0] * len(run.prompts)

    def propose(self, texts: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> dict[int, list[int]]:
        for row, text in texts.items():
            self._tokens[row][self._lengths[row] : len(text)] = text[self._lengths[row] :]
            self._lengths[row] = len(text)
        return {row: looked_up(self._tokens[row][: len(text)], most[row]) for row, text in texts.items()}


def looked_up(tokens: NDArray[np.int64], most: int) -> list[int]:
    """What followed the last occurrence of the longest matching suffix; [] below `SHORTEST_MATCH` tokens.

    If the continuation runs into the end of the text, it wraps around to its own beginning, so that a repeating text goes on.
    """
    last = len(tokens) - 1
    if last < 1 or most < 1:
        return []
    ends, match_length = np.flatnonzero(tokens[:last] == tokens[last]), 1
    while len(ends) and match_length < LONGEST_MATCH:
        longer = ends[ends >= match_length]
        longer = longer[tokens[longer - match_length] == tokens[last - match_length]]
        if not len(longer):
            break
        ends, match_length = longer, match_length + 1
    if not len(ends) or match_length < SHORTEST_MATCH:
        return []
    return [int(token) for token in np.resize(tokens[int(ends[-1]) + 1 :], most)]
