"""The caches of an evaluation, or the two sides of a greedy diff, and the executors that run them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache

import torch

from haarkv.engine.plans import balanced_for, plan_for
from haarkv.engine.session import Session
from haarkv.executors import catalog
from haarkv.executors.base import Executor
from haarkv.models import balance as balancing
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model, read_config
from haarkv.models.checkpoint import Progress
from haarkv.models.config import ModelConfig
from haarkv.models.text import load_tokenizer
from haarkv.models.weights import fingerprint
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Calibration
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec
from haarkv.validation.fidelity.evaluation import Setup, Workload

BASELINE = "bf16"


def parse_list(
    specs: Sequence[str], calibration: Calibration | None = None, accepts: Callable[[str], bool] = lambda _: False
) -> list[str]:
    """Names of caches from lists of formats, as `formats.describe` writes them, each once. `k=` takes the next part with it:

    >>> parse_list(["bf16,k=tq8,v=tq4", "tq2"])
    ['bf16', 'k=tq8,v=tq4', 'tq2']

    Args:
        accepts: parts to take as they stand.
    Raises:
        InputError: half a pair, an empty part, or what `formats.parse` refuses.
    """
    names: dict[str, None] = {}
    for spec in specs:
        parts = iter(part.strip() for part in spec.split(","))
        for part in parts:
            whole = f"{part},{next(parts, '')}" if "=" in part else part
            if not part or whole.endswith(","):
                raise InputError(f"cannot read --kv {spec!r}; write formats with commas between, each NAME or k=NAME,v=NAME")
            # Without a calibration here, the cache's own plan brings one.
            keep_name = accepts(whole) or (calibration is None and formats.needs_calibration(whole))
            names[whole if keep_name else formats.describe(*formats.parse(whole, calibration))] = None
    return list(names)


def load_setup(
    model: str, kvs: Sequence[str] = (), *, spec: KVSpec | None = None, plans: Mapping[str, KVSpec] | None = None,
    executor: str = catalog.AUTO, device: str | None = None, dtype: str | None = None, layers: int | None = None,
    progress: Progress | None = None, balance: bool = True,
) -> Setup:  # fmt: skip
    """Load a model once for all caches, of which there is one at least.

    Args:
        kvs, spec, plans: formats with the tail, sinks and bf16 layers of `spec`, and other caches by name.
        executor: one for all caches and for the baseline, if it has a bf16 cache; `auto` is the fastest that reads all.
        balance: as in `engine.loading.load`; off if a cache has learned coordinates.
    Raises:
        InputError: something of this does not exist or does not fit together.
    """
    config, spec = read_config(model, layers), spec or KVSpec()
    plans_by_name = {kv: plan_for(replace(spec, kv=kv), config) for kv in kvs} | {
        n: plan_for(s, config) for n, s in (plans or {}).items()
    }
    executor = catalog.select(executor, config, list(plans_by_name.values()), device=device, dtype=dtype).name
    block_types = catalog.info(executor).block_types()  # products with weight blocks are measured, too
    loaded_model = load_model(model, dtype or catalog.info(executor).dtype, layers, progress, keep_blocks=block_types)
    if learned_specs := [each for each in (spec, *(plans or {}).values()) if each.weights]:
        weights = fingerprint(loaded_model.weights.named_tensors())
        for each in learned_specs:
            each.require_weights(weights)
    if balance and not any(s.calibration for s in (spec, *(plans or {}).values())):
        loaded_model, _ = balancing.balance(loaded_model)  # the baseline in bf16 computes the same bits
    tokenizer, config = load_tokenizer(model, loaded_model.config), loaded_model.config
    runner = catalog.create(executor, loaded_model, next(iter(plans_by_name.values())), device)
    for plan in plans_by_name.values():
        if reason := runner.supports(config, plan):
            raise InputError(f"executor {executor} cannot run this: {reason}")

    def session(runner: Executor, plan: KVPlan) -> Session:
        return Session(model, config, runner, tokenizer, plan)

    bf16 = plan_for(KVSpec(BASELINE), config)
    without = runner.supports(config, bf16)
    base = session(catalog.create("reference", loaded_model, bf16) if without else runner, bf16)
    caches = {name: session(runner, plan) for name, plan in plans_by_name.items()}
    if BASELINE in caches:
        caches[BASELINE] = base
    # Layers run where they are; embedding and head where the baseline is.
    ends = replace(loaded_model, weights=replace(loaded_model.weights, layers=())).to(base.executor.device)
    return Setup(ends, base, caches, fingerprint(loaded_model.weights.named_tensors()))


# -- Fingerprints: what a partial result belongs to -------------------------------------------------------------------------


def run_fingerprint(setup: Setup, plan: Workload) -> dict[str, str]:
    """What must be equal for two runs' results to belong together, by a word for the user."""
    executors = {setup.base.executor.name, *(side.executor.name for side in setup.caches.values())}
    return {
        "model": setup.weights + _digest(json.dumps(asdict(setup.model.config), sort_keys=True, default=str).encode()),
        "text": _digest(plan.tokens.numpy().tobytes()),
        "windows": _digest(json.dumps([(w.start, len(w)) for w in plan.windows]).encode()),
        "executor": ", ".join(sorted(executors)),
        "dtype": str(setup.model.dtype).removeprefix("torch."),
    }


def cache_fingerprint(side: Session) -> str:
    """Digest of what a cache makes of fixed vectors: another code or table of a format, another digest."""
    x = torch.randn(4, side.config.heads.head_dim, generator=torch.Generator().manual_seed(0))
    layer = side.config.kv_shapes.index(side.config.attentions[0].kv_shape)
    digest = hashlib.sha256()
    digest.update(side.plan.describe().encode())
    for kv_format in side.plan.formats:
        vectors = x if kv_format.group_tokens == 1 else x.repeat(kv_format.group_tokens // len(x), 1)
        stored_fields = kv_format.quantize(vectors, layer)
        for name, tensor in sorted(stored_fields.items()):
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        # Restored numbers may differ in their last bits from machine to machine; four digits of their sum do not.
        decoded_vectors = kv_format.dequantize(stored_fields, layer).double()
        digest.update(f"{(decoded_vectors * vectors.double()).sum().item():.4g}".encode())
    return digest.hexdigest()[:16]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# -- The two sides of a greedy diff --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Contender:
    """One side of a diff: an executor, and a format as `--kv` takes it."""

    executor: str = catalog.AUTO
    kv: str = "tq4"


def parse_contender(spec: str) -> Contender:
    """Read EXECUTOR, FORMAT or EXECUTOR:FORMAT; `auto` and tq4 unless named."""
    names = (catalog.AUTO, *catalog.NAMES)
    executor, colon, kv = spec.partition(":")
    if not colon:
        executor, kv = (spec, Contender.kv) if spec in names else (Contender.executor, spec)
    side = Contender(executor, kv)
    if side.executor not in names or not ("=" in side.kv or side.kv in formats.names()):
        raise InputError(
            f"cannot read {spec!r}; write EXECUTOR, FORMAT or EXECUTOR:FORMAT with an executor of "
            f"{', '.join(names)} and a KV format of {', '.join(formats.names())} or k=NAME,v=NAME"
        )
    return replace(side, kv=formats.describe(*formats.parse(side.kv)))


def resolve_contenders(
    sides: Sequence[Contender], config: ModelConfig, spec: KVSpec, device: str | None = None, dtype: str | None = None
) -> tuple[list[Contender], str]:
    """Sides with the fastest executor in place of `auto`, and a dtype for both: float32 if that is the default of both.

    It is one executor for both, or two formats would differ by executor.
    """
    if open_sides := [side for side in sides if side.executor == catalog.AUTO]:
        plans = [plan_for(replace(spec, kv=side.kv), config) for side in open_sides]
        name = catalog.select(catalog.AUTO, config, plans, device=device, dtype=dtype).name
        sides = [replace(side, executor=name) if side in open_sides else side for side in sides]
    common = "bfloat16" if "bfloat16" in {catalog.info(side.executor).dtype for side in sides} else "float32"
    return list(sides), dtype or common


def load_contenders(
    model: str, sides: Sequence[Contender], spec: KVSpec | None = None, *, device: str | None = None,
    dtype: str | None = None, layers: int | None = None, balance: bool = True, progress: Progress | None = None,
) -> tuple[Session, Session, str]:  # fmt: skip
    """Load a model and set up both sides: once, unless one side multiplies with the file's weight blocks directly.

    Args:
        spec, balance: tail, sinks and bf16 layers of both sides; whether each is balanced by its own format.
        device: of every executor but the reference.
    Returns:
        both sides, and the dtype.
    """
    config, spec = read_config(model, layers), spec or KVSpec()
    sides, common_dtype = resolve_contenders(sides, config, spec, device, dtype)
    tokenizer, only_reference = load_tokenizer(model, config), {side.executor for side in sides} == {"reference"}

    @cache
    def model_with_blocks(block_types: tuple[str, ...]) -> DecoderModel:
        return load_model(model, common_dtype, layers, progress, keep_blocks=block_types)

    @cache
    def balanced_model(kv: str, block_types: tuple[str, ...]) -> tuple[KVPlan, DecoderModel]:
        plan = plan_for(replace(spec, kv=kv), model_with_blocks(block_types).config)
        return plan, balanced_for(model_with_blocks(block_types), plan, spec, balance)[0]

    def session(side: Contender) -> Session:
        plan, balanced = balanced_model(side.kv, catalog.info(side.executor).block_types())
        where = device if only_reference or side.executor != "reference" else None
        executor = catalog.create(side.executor, balanced, plan, where)
        return Session(model, balanced.config, executor, tokenizer, plan)

    return session(sides[0]), session(sides[1]), common_dtype
