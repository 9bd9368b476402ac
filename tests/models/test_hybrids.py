"""Layers that keep a state in place of K and V: where they are, what commands say of them, and what refuses them."""

import json

import pytest
from family_models import saved

from haarkv.models.catalog import read_config
from haarkv.models.config import Attention
from haarkv.models.layer import DeltaNet
from haarkv.models.parallel import Split
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from tq.cli import main

__all__ = ["saved"]


def test_three_of_four_layers_remember_and_one_attends():
    config = read_config("random:qwen3.5-0.8b")
    kinds = [type(layer.mixer) for layer in config.layers]
    assert kinds == [DeltaNet, DeltaNet, DeltaNet, Attention] * 6
    assert config.layers[3].attention.rope.dims == 64
    (shape,) = {shape.tensors for shape in config.state_shapes.values()}
    assert [size for _, size, _ in shape] == [(3, 6144), (16, 128, 128)]


def test_ranks_refuse_a_state():
    with pytest.raises(InputError, match="recurrent state cannot be split over ranks"):
        Split(read_config("random:qwen3.5-0.8b"), 0, 2)


@pytest.mark.parametrize("size", ["qwen3.5-0.8b", "qwen3.5-35b-a3b", "qwen3-next"])
def test_the_gpu_takes_hybrids_dense_and_with_experts(size):
    from haarkv.executors.cuda import CudaExecutor

    config = read_config(f"random:{size}")
    assert CudaExecutor.supports(config, KVSpec("tq4").plan(config.num_layers)) is None


def test_validate_judges_a_checkpoint(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = saved("qwen3_5")[0]
    command = ["validate", "--model", str(folder), "--executor", "cpu", "--prompt", "ab", "--prompt", "c", "--steps", "1"]
    assert main([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["passed"]
    assert {row["layer"] for row in said["rows"] if row["state_err"] is not None} == {0, 1, 2}


def test_info_tells_a_state_from_k_and_v(capsys):
    assert main(["info", "random:qwen3.5-0.8b"]) == 0
    said = capsys.readouterr().out
    assert "24, 18 of them with a state in place of K and V" in said
    assert (
        "20.2 MB a sequence, whatever its length; kept 2 times, 40.4 MB; with --draft once more for each drafted token" in said
    )
    assert main(["info", "random:qwen3.5-0.8b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state_bytes"] == read_config("random:qwen3.5-0.8b").state_bytes
    assert main(["info", "random:0.6b"]) == 0
    assert "state" not in capsys.readouterr().out
