"""A calibration file of made-up coordinates, for the weights of a model at hand."""

from dataclasses import replace

from haarkv.engine.plans import shape_signature
from haarkv.models.catalog import load_model
from haarkv.models.weights import fingerprint
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv import plan_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile, make_calibration, save


def write_calibration(path, model="tiny", weights=None, **plan):
    """Of every layer and KV head of a model, by name or folder.

    Args:
        weights: the fingerprint of another model.
        plan: fields of a `KVSpec`, to make the file a plan of these coordinates.
    """
    loaded_model = load_model(str(model), "bfloat16")
    config, shape = loaded_model.config, shape_signature(loaded_model.config)
    calibration = synthetic.calibration(config.num_layers, config.heads.num_kv_heads, config.heads.head_dim)
    weights = weights or fingerprint(loaded_model.weights.named_tensors())
    file = CalibrationFile(make_calibration(calibration.k), shape, weights)
    if plan:
        kv_plan = replace(file.spec, **plan).plan(config.num_layers)
        file = replace(file, plan=plan_file.dumps(kv_plan, shape))
    save(path, file)
    return path
