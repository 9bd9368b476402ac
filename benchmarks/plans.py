"""The caches that `tq bench` compares: a format, or several that layers take in turn, with tokens in BF16 beside them.

list := cache {"," cache}
cache := pair {"/" pair} {"+tail" N | "+sink" N}
pair := NAME | "k=" NAME ",v=" NAME
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from haarkv.benchmarks.attention import MOST_COPIES
from haarkv.benchmarks.cases import heads
from haarkv.engine.plans import plan_for
from haarkv.models.base import DecoderConfig
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import made_up
from haarkv.tq_ops.kv.plan import KVPlan, KVSpec

_CACHE = re.compile(r"(?P<pairs>[^+]+)(?P<beside>(\+(tail|sink)\d{1,9})*)")


def parse_caches(specs: Sequence[str]) -> list[str]:
    """Caches from lists of them, each once, in the order given.

    >>> parse_caches(["tq4,k=tq4,v=tq3+tail128", "k=tq4,v=tq3/bf16"])
    ['tq4', 'k=tq4,v=tq3+tail128', 'k=tq4,v=tq3/bf16']

    Raises:
        InputError: half a pair, an empty part, or an unknown format.
    """
    found: dict[str, None] = {}
    for spec in specs:
        parts = iter(part.strip() for part in spec.split(","))
        for whole in parts:
            while whole.count("k=") != whole.count("v="):
                following = next(parts, None)
                if following is None:
                    raise _unreadable(spec)
                whole = f"{whole},{following}"
            for pair in _split(whole)[0]:
                if not formats.needs_calibration(pair):
                    formats.parse(pair)
            found[whole] = None
    return list(found)


def plain(kv: str) -> bool:
    """Whether a cache is one pair of formats for all layers, with nothing beside it."""
    return not set(kv) & set("+/")


def plan_of(kv: str, config: DecoderConfig) -> KVPlan:
    """The plan of a cache for a model; learned nibbles are of made-up coordinates, other ones in each copy of a layer.

    Raises:
        InputError: as `parse_caches`, or it does not fit the model.
    """
    pairs, tail, sink = _split(kv)
    named = {layer: pairs[layer % len(pairs)] for layer in range(config.num_layers)}
    if not any(map(formats.needs_calibration, pairs)):
        return plan_for(KVSpec(tail=tail, sink=sink, layers=named), config)
    _, kv_heads, dim = heads(config)
    learned = made_up.calibration(max(config.num_layers, MOST_COPIES), kv_heads, dim)
    parsed = {pair: formats.parse(pair, learned) for pair in pairs}
    return KVPlan(tuple(parsed[pair] for pair in named.values()), tail, sink)


def _split(kv: str) -> tuple[list[str], int | None, int]:
    """Pairs, tail and sink."""
    read = _CACHE.fullmatch(kv)
    if read is None:
        raise _unreadable(kv)
    beside = dict(re.findall(r"\+(tail|sink)(\d+)", read["beside"]))
    tail = beside.get("tail")
    return read["pairs"].split("/"), None if tail is None else int(tail), int(beside.get("sink", 0))


def _unreadable(spec: str) -> InputError:
    return InputError(
        f"cannot read --kv {spec!r}; write caches with commas between, each NAME or k=NAME,v=NAME, or several with / between "
        "for layers that take turns; then +tailN and +sinkN"
    )
