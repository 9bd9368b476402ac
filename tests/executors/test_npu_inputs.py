"""What the host hands to the NPU programs of learned keys, and what it refuses of them."""

from dataclasses import replace

import pytest
import torch
from npu_layers import CONFIG, fill_cache, learned_spec
from small_models import resize_config, small_model

from haarkv.codebooks.learned import learn
from haarkv.executors import catalog, npu
from haarkv.executors.npu import NpuExecutor
from haarkv.models.qwen3_14b.npu.compile import plan_programs
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.formats.learned import Calibration
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.npu import learned
from haarkv.tq_ops.npu.device import SimRunner
from haarkv.tq_ops.npu.sides import window_shape

CPU = torch.device("cpu")
SMALLER = resize_config(CONFIG, num_heads=4, max_position_embeddings=4096)


def test_channels_that_queries_hardly_have_leave_products_with_queries_all_their_bits(monkeypatch):
    """Rows are 1e7 there, and 10 or less elsewhere. Heads' norms of four layers of Gemma 3 270M have zeros."""
    generator = torch.Generator().manual_seed(0)
    channel = torch.logspace(0, 1, 128, dtype=torch.float64)
    channel[::16] *= 1e-8
    q, k = (torch.randn(4096, 128, generator=generator, dtype=torch.float64) for _ in "qk")
    q, k = q * channel, k @ torch.randn(128, 128, generator=generator, dtype=torch.float64)
    basis = learn((q.T @ q)[None], (k.T @ k)[None], torch.zeros(1, 128))
    assert basis.back.abs().max() > 1e6 * basis.back[..., 1].abs().max()
    kv_format, queries = Calibration((basis,), "faint channels").format(5), q[:256].to(torch.bfloat16).float()

    def off():
        learned.domain_tensors.cache_clear()
        products = queries @ learned.domain_tensors(kv_format, 128, 0, CPU)["rows"].T
        return ((products.half().float() - products).norm(dim=-1) / products.norm(dim=-1)).max(), products.abs().max()

    error, largest = off()
    assert error < 2**-11
    assert largest < 2**6
    monkeypatch.setattr(learned, "_HEADROOM", torch.inf)
    assert off()[0] > 2**-6


def test_layers_run_by_their_own_formats_and_coordinates_are_handed_over_once(monkeypatch):
    """Coordinates are the same tensors in every call; a fixed format has rows that nothing reads."""
    constants, calls = [], []

    class Runner(SimRunner):
        def __init__(self):
            pass

        def constant(self, tensor):
            constants.append(tensor)
            return tensor

        def call(self, program, tensors):
            by_name = dict(zip((argument.name for argument in program.arguments), tensors, strict=True))
            widths = [by_name[argument.name].shape[1] for argument in program.k.arguments("k")]
            calls.append((program.k.name, program.v.name, widths, by_name))

    monkeypatch.setattr(npu, "open_runner", lambda _: Runner())
    spec = replace(learned_spec(CONFIG), layers={1: "k=bf16,v=tq4_seed"})
    executor = catalog.create("npu", small_model(CONFIG, dtype=torch.bfloat16), spec.plan(2), "sim")
    for _ in range(2):
        cache, paging, sequences = fill_cache(CONFIG, spec, [3], seed=1)
        executor.layers(torch.zeros(1, 128, dtype=torch.bfloat16), range(2), paging.batch(sequences, [1]), cache)
    assert [call[:3] for call in calls] == 2 * [("lr4", "tq4", [64, 128]), ("bf16", "tq4_seed", [128, 128])]
    assert [len(tensors["k_forward"]) for *_, tensors in calls] == [256, 1, 256, 1]
    for (*_, first), (*_, second) in zip(calls[:2], calls[2:], strict=True):
        for name in ("k_forward", "k_rows"):
            assert first[name] is second[name]
            assert len(first[name]) == 1 or any(first[name] is one for one in constants)


def test_keys_that_turn_in_part_are_refused_by_name():
    calibration = synthetic.calibration()
    bases = tuple(replace(basis, inv_freq=basis.inv_freq[:32]) for basis in calibration.k)
    part = KVSpec("k=lr4,v=tq4", calibration=replace(calibration, k=bases)).plan(2)
    assert NpuExecutor.supports(SMALLER, learned_spec(SMALLER).plan(2)) is None
    message = "its programs turn all 128 numbers of a key, and lr4 turns 64 of them"
    assert NpuExecutor.supports(SMALLER, part) == message
    with pytest.raises(InputError, match=message):
        plan_programs(SMALLER, ["decode"], part)


def test_a_layer_without_loss_keeps_nothing():
    plan = KVSpec("tq4", tail=8, layers={1: "bf16"}).plan(2)
    assert NpuExecutor.supports(CONFIG, plan) is None
    assert window_shape(plan, 0).window == 72
    assert window_shape(plan, 1) is None
