"""Where a decode step's time goes: every part has some, and the executor is as before."""

import json

import pytest
import torch
from small_models import SMALL, resized, small_model

from haarkv.benchmarks import step_profile
from haarkv.executors.cpu import CpuExecutor
from haarkv.tq_ops.cpu.library import PARTS
from haarkv.tq_ops.errors import InputError

WEIGHTS_OF_A_LAYER = 2 * (48 * 1280 + 2 * 48 * 256 + 1280 * 48 + 3 * 48 * 80)  # q, k and v, o, the MLP; BF16


def test_parts_and_bytes_of_a_step():
    model = small_model(dtype=torch.bfloat16)
    executor = CpuExecutor(model)
    ops = executor.ops
    found = step_profile.profile(executor, model, "tq4", 40, 3)
    assert set(found.parts) == {*PARTS, "head", "sampling", "between"}
    assert all(ms > 0 for ms in found.parts.values())
    assert found.bytes == {
        "projections": SMALL.num_layers * WEIGHTS_OF_A_LAYER, "head": 2 * 61 * 48, "attention": 40 * SMALL.num_layers * 4 * 66,
    }  # fmt: skip
    assert executor.ops is ops
    assert executor.whole.spent is None


def test_the_time_of_a_part_is_its_own(monkeypatch):
    """A head that is slow shows in the head."""
    model = small_model(dtype=torch.bfloat16)
    executor, linear = CpuExecutor(model), step_profile.CpuOps.linear

    def slow(self, x, weight):
        for _ in range(300):
            linear(self, x, weight)
        return linear(self, x, weight)

    monkeypatch.setattr(step_profile.CpuOps, "linear", slow)
    parts = step_profile.profile(executor, model, "tq4", 40, 3).parts
    assert parts["head"] > max(ms for name, ms in parts.items() if name != "head")


def test_layers_that_run_op_by_op_are_refused():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = small_model(resized(SMALL, model_type="qwen3_moe", **experts))
    with pytest.raises(InputError, match="only dense models"):
        step_profile.profile(CpuExecutor(model), model, "tq4", 40, 1)


def test_a_context_without_room_for_the_steps_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        step_profile.main(["--model", "tiny", "--contexts", "4093", "--steps", "1"])
    assert stop.value.code == 2
    assert "4,092 fit" in capsys.readouterr().err


def test_the_command_prints_a_table_and_a_line(capsys, monkeypatch):
    monkeypatch.setattr(step_profile, "_READ_BYTES", 2**20)
    step_profile.main(["--model", "tiny", "--contexts", "16,40", "--steps", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("together") for line in lines) == 2
    line = json.loads(lines[-1])
    assert [of["context"] for of in line["contexts"]] == [16, 40]
    assert line["read_bytes_per_s"] > 0


@pytest.mark.parametrize("given", [["--contexts", "x"], ["--steps", "0"], ["--model", "random:9b"]])
def test_what_cannot_be_is_refused(given, capsys):
    with pytest.raises(SystemExit) as ended:
        step_profile.main(given)
    assert ended.value.code == 2
    assert capsys.readouterr().err
