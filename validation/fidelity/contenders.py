"""The sides of a greedy diff: what a user calls them, and the sessions that they stand for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from haarkv.engine.plans import balanced_for, plan_for
from haarkv.engine.session import Session
from haarkv.executors import catalog
from haarkv.models.balance import Balanced
from haarkv.models.base import DecoderModel
from haarkv.models.catalog import load_model, read_config
from haarkv.models.checkpoint import Progress
from haarkv.models.text import load_tokenizer
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec


@dataclass(frozen=True)
class Contender:
    """One side of a diff: the executor that runs the forwards, and how K and V are stored (as `--kv` takes it)."""

    executor: str = catalog.AUTO
    kv: str = "tq4"

    def __str__(self) -> str:
        return f"{self.executor}:{self.kv}"


def parse_contender(spec: str) -> Contender:
    """Read EXECUTOR, FORMAT or EXECUTOR:FORMAT; `auto` and tq4 unless named.

    Raises:
        InputError: none of these; the message lists the executors and formats there are.
    """
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
    model: str,
    side_a: Contender,
    side_b: Contender,
    spec: KVSpec,
    *,
    device: str | None = None,
    dtype: str | None = None,
    layers: int | None = None,
) -> tuple[Contender, Contender]:
    """Both sides with an executor in place of `auto`: the fastest that reads the formats of all sides that left it open.

    One executor for both, so that two formats are not told apart by who ran them.

    Args:
        model, device, dtype, layers, spec: as in `load_contenders`.
    Raises:
        InputError: as `executors.catalog.select`.
    """
    sides = (side_a, side_b)
    if not (open_sides := [side for side in sides if side.executor == catalog.AUTO]):
        return sides
    config = read_config(model, layers)
    plans = [plan_for(replace(spec, kv=side.kv), config) for side in open_sides]
    name = catalog.select(catalog.AUTO, config, plans, device=device, dtype=dtype).name
    a, b = (replace(side, executor=name) if side in open_sides else side for side in sides)
    return a, b


def default_dtype(*sides: Contender) -> str:
    """The dtype in which sides can be compared: float32 if that is the default of each of their executors."""
    return "bfloat16" if "bfloat16" in {catalog.info(side.executor).dtype for side in sides} else "float32"


def load_contenders(
    model: str,
    side_a: Contender,
    side_b: Contender,
    *,
    dtype: str,
    device: str | None = None,
    layers: int | None = None,
    spec: KVSpec | None = None,
    balance: bool = True,
    progress: Progress | None = None,
) -> tuple[Session, Session]:
    """Load a model and set up both sides with it: once, but for a file of blocks that one side multiplies with as they are.

    Args:
        side_a, side_b: with executors by name, as `resolve_contenders` gives them.
        model, layers, progress: as in `engine.loading.load`.
        dtype: of both sides; float32 or bfloat16.
        device: of every executor but the reference, which has only one.
        spec: tail, sinks and layers left in bf16, of both sides; its `kv` gives way to theirs.
        balance: as in `engine.loading.load`, of each side by its own formats: both run as they generate.
    Raises:
        InputError: whatever of this does not exist or does not fit together.
    """
    loaded: dict[tuple[str, ...], DecoderModel] = {}
    tokenizer = load_tokenizer(model, read_config(model, layers))
    only_reference = {side_a.executor, side_b.executor} == {"reference"}
    spec = spec or KVSpec()
    balanced: dict[tuple[str, tuple[str, ...]], Balanced] = {}

    def session(side: Contender) -> Session:
        kept = catalog.info(side.executor).block_types()
        if kept not in loaded:
            loaded[kept] = load_model(model, dtype, layers, progress, keep_blocks=kept)
        config = loaded[kept].config
        plan = plan_for(replace(spec, kv=side.kv), config)
        if (side.kv, kept) not in balanced:
            balanced[side.kv, kept] = balanced_for(loaded[kept], plan, spec, balance)
        balanced_model = balanced[side.kv, kept]
        where = device if only_reference or side.executor != "reference" else None
        executor = catalog.create(side.executor, balanced_model.model, plan, where)
        return Session(model, config, executor, tokenizer, plan, uneven=balanced_model.uneven)

    return session(side_a), session(side_b)
