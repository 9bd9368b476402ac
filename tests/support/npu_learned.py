"""Made-up learned coordinates for the NPU programs, in which the first coordinates of K own two nibbles."""

from bases import basis

from haarkv.tq_ops.formats.learned import Calibration
from haarkv.tq_ops.kv.plan import KVSpec

KV = "k=lr4,v=tq3"


def made_up(layers=2, heads=2, seed=0, dim=128):
    """Weights fall by 10**4, so 128 nibbles are spent on fewer coordinates than there are."""
    sides = [tuple(basis(heads, dim, seed + 2 * layer + side, spread=4.0) for layer in range(layers)) for side in (0, 1)]
    return Calibration(*sides, digest=f"made up for npu {seed}")


def learned_spec(config, kv=KV, seed=0):
    """Of a model of that shape."""
    return KVSpec(kv, calibration=made_up(config.num_layers, config.heads.num_kv_heads, seed))
