"""A calibration file of made-up coordinates, for the weights of a model at hand."""

from npu_learned import made_up

from haarkv.engine.session import shape_of
from haarkv.models.catalog import load_model
from haarkv.models.fingerprint import fingerprint
from haarkv.tq_ops.kv.calibration_file import CalibrationFile, calibration_of, dumps


def write_calibration(path, model="tiny", weights=None, seed=0):
    """Of every layer and KV head of a model, by name or folder; `weights` is another model's fingerprint."""
    loaded = load_model(str(model), "bfloat16")
    config = loaded.config
    made = made_up(config.num_layers, config.num_kv_heads, seed, config.head_dim)
    found = weights or fingerprint(loaded.weights.named())
    path.write_bytes(dumps(CalibrationFile(calibration_of(made.k, made.v), shape_of(config), found)))
    return path
