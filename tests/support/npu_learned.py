"""Made-up learned coordinates of keys for the NPU programs."""

from haarkv.tq_ops.formats import made_up
from haarkv.tq_ops.kv.plan import KVSpec

KV = "k=lr4,v=tq4"


def learned_spec(config, kv=KV, seed=0, turning=False):
    """Of a model of that shape; keys are stored as they stand, which the programs do at any length."""
    heads = config.heads.num_kv_heads
    return KVSpec(kv, calibration=made_up.calibration(config.num_layers, heads, seed=seed, turning=turning))
