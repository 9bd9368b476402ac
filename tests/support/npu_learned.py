"""Made-up learned coordinates of keys for the NPU programs."""

from haarkv.tq_ops.formats import made_up
from haarkv.tq_ops.kv.plan import KVSpec

KV = "k=lr4,v=tq4"


def learned_spec(config, kv=KV, seed=0, turning=False):
    """Of a model of that shape.

    Args:
        turning: keys are stored by stretches; else as they stand, by a program of its own.
    """
    heads = config.heads
    calibration = made_up.calibration(config.num_layers, heads.num_kv_heads, heads.head_dim, seed=seed, turning=turning)
    return KVSpec(kv, calibration=calibration)
