"""What a Gemma 3 keeps of a long text: all of it in one layer of six, a bounded ring in the others."""

import pytest

from haarkv.engine.plans import needed, plan_for
from haarkv.models.caches import new_cache
from haarkv.models.families import SIZES
from haarkv.models.footprint import WeightBytes
from haarkv.tq_ops.kv.plan import KVSpec

VECTOR = {"tq4": 130, "bf16": 512}  # bytes of 256 numbers: codes and a scale of two bytes, or BF16
RING = 1152
"""512 tokens that a local layer sees and 512 that come at once, wherever they begin in a block of 128."""


@pytest.mark.parametrize("kv", VECTOR)
@pytest.mark.parametrize("tokens", [8192, 32768])
def test_what_is_allocated_is_what_was_announced_and_local_layers_are_bounded(kv, tokens):
    config = SIZES["gemma-270m"]
    plan = plan_for(KVSpec(kv), config)
    cache, _ = new_cache(config, plan, sequences=1, tokens=tokens)
    assert cache.nbytes == needed(config, plan, tokens, WeightBytes()).kv
    assert cache.nbytes == (3 * tokens + 15 * RING) * 2 * VECTOR[kv]
