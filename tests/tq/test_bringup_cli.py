"""`tq dev bringup`: rungs broken and named, and what the folder holds."""

import json
from dataclasses import replace

import pytest
import torch
from calibration_files import write_calibration
from checkpoints import write_checkpoint
from npu_programs import with_pypto
from refusals import assert_refused

from haarkv.benchmarks import timing
from haarkv.executors import catalog
from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops import reference
from haarkv.tq_ops.npu.device import SimRunner
from haarkv.validation.bringup import ladder
from haarkv.validation.bringup.ladder import RUNGS
from haarkv.validation.bringup.workbench import Workbench
from haarkv.validation.faults.base import WholeLayers, table_with
from tq.cli import main
from tq.commands import bringup as bringup_command

NAMES = list(RUNGS)
PROGRAM_RUNGS = ("long-decode",)
"""The rung that `cpu`, whose kernels are no programs, does not have."""
QUICK = ("--kv", "tq4", "--prompt", "def main(argv):", "--max-new-tokens", "8", "--contexts", "20,60")
"""The text is validated up to 21 tokens, 22 in a verify, and continued up to 23."""
SHORT = ("--max-new-tokens", "2", "--contexts", "20")
"""For climbs whose highest rungs are not what is looked at."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("bringup") / "checkpoint", config={"head_dim": 64})


@pytest.fixture
def bringup(capsys, tmp_path, monkeypatch, checkpoint):
    """Runs `tq dev bringup` on a small model: (exit code, stdout, stderr); the results are in `folder`."""
    monkeypatch.setattr(bringup_command, "_REPEATS", 1)
    monkeypatch.setattr(timing, "_REST_S", 0.0)

    def call(*args, executor="cpu"):
        common = ["--model", str(checkpoint), "--executor", executor, "--out", str(call.folder), *QUICK]
        code = main(["dev", "bringup", *common, *args])
        return code, *capsys.readouterr()

    call.folder = tmp_path / "out"
    return call


@pytest.fixture
def trial(monkeypatch):
    """Put another executor in the place of `cpu`."""

    def put(build):
        entry = replace(catalog.EXECUTORS["cpu"], open=lambda model, device: build(model), missing=lambda: None)
        monkeypatch.setitem(catalog.EXECUTORS, "cpu", entry)

    return put


def rung_reports(folder):
    """By name, in order."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return {rung["name"]: rung for rung in report["rungs"]}


def failed_at(bringup, rung, *words):
    """What a folder holds after a failed rung: those beneath it passed, those above it were not run, and all of it is said."""
    code, out, err = bringup()
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[-2].startswith(f"failed: {rung}")
    for word in words:
        assert word in out, out
    below, above = NAMES[: NAMES.index(rung)], NAMES[NAMES.index(rung) + 1 :]
    assert [line.split()[0] for line in lines[:-2]] == [*below, rung]
    rungs = rung_reports(bringup.folder)
    assert list(rungs) == [*below, rung]
    assert all(rungs[name]["verdict"] == "passed" for name in below if name not in PROGRAM_RUNGS)
    assert rungs[rung]["verdict"] == "failed"
    report = json.loads((bringup.folder / "report.json").read_text(encoding="utf-8"))
    assert report["bringup"].startswith(f"failed: {rung}")
    assert report["not run"] == above
    assert all(word in json.dumps(report) for word in words)
    return report


# -- Each rung broken once --------------------------------------------------------------------------------------------------


def test_every_rung_passes_and_says_what_it_compared(bringup):
    code, out, err = bringup()
    assert (code, err) == (0, "")
    assert out.splitlines()[-2] == f"passed: 7 of 8 rungs, not on this executor: {', '.join(PROGRAM_RUNGS)}"
    results = [rung for name, rung in rung_reports(bringup.folder).items() if name not in PROGRAM_RUNGS]
    assert all(result["verdict"] == "passed" and result["found"]["compared"] > 0 for result in results)
    assert [path.name for path in bringup.folder.iterdir()] == ["report.json"]
    facts = {name: fact for name, fact in results[-1]["found"]["facts"].items() if not name.startswith("compiled")}
    assert set(facts) == {f"{call} tq4 at {context}" for call in ("prompt", "step") for context in (20, 60)}
    assert all(float(fact.split()[0]) > 0 for fact in facts.values())


def test_a_version_that_is_not_asked_for_fails_the_environment(bringup, monkeypatch):
    monkeypatch.setattr(ladder, "_installed_version", lambda name: "1.13.0" if name == "torch" else "99")
    monkeypatch.setattr(ladder, "requires", lambda _: ["torch>=2.11", "numpy"])
    failed_at(bringup, "environment", "torch 1.13.0 is installed, and haarkv needs torch>=2.11")


def with_ops(**ops):
    return lambda model: ReferenceExecutor(model, table_with(ops))


def store_a_wrong_byte(k, v, at):
    reference.store_kv(k, v, at)
    slot = int(at.batch.slot_mapping[-1])
    at.kv.v.fields["codes"][slot // at.kv.block_size, 1, slot % at.kv.block_size, 5] ^= 0x80


def with_wrong_weight(layer, name):
    """The reference with one weight that is not the model's: of a layer, or of the head."""

    def build(model):
        def off(field, tensor):
            return tensor * 1.1 if field == name else tensor

        weights = model.weights
        if layer is None:
            return ReferenceExecutor(replace(model, weights=replace(weights, lm_head=weights.lm_head * 1.1)))
        if layer >= model.config.num_layers:
            return ReferenceExecutor(model)
        layers = [w.map(off) if index == layer else w for index, w in enumerate(weights.layers)]
        return ReferenceExecutor(replace(model, weights=replace(weights, layers=tuple(layers))))

    return build


class Overtaking(ReferenceExecutor):
    """Runs the layers of a whole forward in the wrong order; each of them alone is right."""

    def __init__(self, model):
        super().__init__(model)
        order = model.config.num_layers > 1
        self._reversed = replace(model, weights=replace(model.weights, layers=model.weights.layers[:: -1 if order else 1]))

    def forward(self, token_ids, batch, cache):
        return self._reversed.forward(token_ids, batch, cache, self.ops)


class Forgetting(ReferenceExecutor):
    """Predicts another token once a text is longer than any that was validated."""

    def forward(self, token_ids, batch, cache):
        self._longer = len(token_ids) == len(batch.seq_lens) and int(batch.seq_lens.max()) == 22
        return super().forward(token_ids, batch, cache)

    def head(self, hidden):
        logits = super().head(hidden)
        return logits.roll(1, -1) if self._longer else logits


class Forgetful(ReferenceExecutor):
    """Takes 16 keys of decode in a step, and does not let what came before shrink where a later step has a larger maximum."""

    decode_step = 16

    def layers(self, hidden, span, batch, cache):
        if len(hidden) > len(batch.seq_lens) or int(batch.seq_lens.max()) < 60:
            return super().layers(hidden, span, batch, cache)
        return self._model.layers(hidden, span, batch, cache, table_with({"paged_attention": not_shrunk}))


def not_shrunk(q, at, scale):
    right = reference.paged_attention(q, at, scale)
    early = replace(at.batch, positions=at.batch.positions.clamp(max=15))
    return right + reference.paged_attention(q, replace(at, batch=early), scale)


class Refusing(ReferenceExecutor):
    """A compiler that refuses a length, in eighty lines."""

    def forward(self, token_ids, batch, cache):
        if int(batch.seq_lens.max()) >= 60:
            raise RuntimeError(
                "[ERROR] AICore: UB overflow in kernel 17\n" + "\n".join(f"#{n} at /home/someone/x.cpp" for n in range(80))
            )
        return super().forward(token_ids, batch, cache)


def test_a_call_that_raises_fails_the_latency_in_one_line_and_a_log(bringup, trial):
    trial(Refusing)
    report = failed_at(bringup, "latency", "[ERROR] AICore: UB overflow in kernel 17")
    log = (bringup.folder / "latency.log").read_text(encoding="utf-8")
    assert "#79 at /home/someone/x.cpp" in log
    assert "#79 at …/x.cpp" in report["rungs"][-1]["log"][-1]
    assert "someone" not in json.dumps(report)


class Empty(ReferenceExecutor):
    """Gives no numbers for a length that is only timed."""

    def forward(self, token_ids, batch, cache):
        out = super().forward(token_ids, batch, cache)
        return torch.zeros_like(out) if int(batch.seq_lens.max()) >= 60 else out


FAULTS = {
    "byte": ("layer", with_ops(store_kv=store_a_wrong_byte), " at tq4, layer 0, store_kv.v"),
    "layer": ("layer", with_wrong_weight(0, "o_proj"), " at tq4, layer 0, attention_mlp"),
    "layer's V": ("layer", with_wrong_weight(0, "v_proj"), " at tq4, layer 0, store_kv.v"),
    "head": ("head", with_wrong_weight(None, "lm_head"), " at tq4, forward"),
    "later steps": ("long-decode", Forgetful, " at tq4, layer 0, attention"),
    "second layer": ("teacher-forced", with_wrong_weight(1, "down_proj"), " at tq4, layer 1, attention_mlp"),
    "together": ("free-running", Overtaking, " at tq4, forward", "the whole forward stores another K in layer 0"),
    "token": ("text", Forgetting, "tq4, prompt 1, new token 8: another token than the reference's, and no near tie"),
    "no numbers": ("latency", Empty, "gives nothing but 0.0"),
}
"""The rung that shall fail, and what it says; what begins with `at` is where, and stands in the verdict."""


@pytest.mark.parametrize(("rung", "build", "words"), [(r, b, w) for r, b, *w in FAULTS.values()], ids=FAULTS)
def test_what_is_wrong_fails_its_rung_and_is_named(bringup, trial, rung, build, words):
    trial(build)
    report = failed_at(bringup, rung, *(word.removeprefix(" at ") for word in words))
    if words[0].startswith(" at "):
        assert report["bringup"].startswith(f"failed: {rung}{words[0]}")


# -- The folder -------------------------------------------------------------------------------------------------------------


def test_a_folder_is_not_written_over(bringup):
    (bringup.folder).mkdir()
    assert_refused(bringup(), "name a folder that does not")
    assert list(bringup.folder.iterdir()) == []


def interrupt(model):
    raise KeyboardInterrupt


def test_an_interruption_leaves_a_report(bringup, trial):
    trial(interrupt)
    code, out, err = bringup()
    assert (code, err) == (130, "tq: interrupted\n")
    assert [line.split()[0] for line in out.splitlines()] == ["environment"]
    assert [path.name for path in bringup.folder.iterdir()] == ["report.json"]
    assert json.loads((bringup.folder / "report.json").read_text())["bringup"].startswith("unfinished: 1 of 8 rungs passed")


# -- What cannot be tried ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executor", "args", "word"),
    [
        ("catalog", (), "unknown executor 'catalog'"),
        ("reference", (), "compared with itself proves nothing"),
        ("cpu", ("--device", "npu:0"), "runs on the cpu, not on 'npu:0'"),
        ("onnx", ("--kv", "kivi4"), "executor onnx cannot run this"),
        ("cpu", ("--contexts", "999999"), "and the calls that are timed, not 999999"),
    ],
)
def test_what_cannot_be_tried_is_one_line_and_2(bringup, executor, args, word):
    code, _, err = bringup(*args, executor=executor)
    assert (code, err.count("\n")) == (2, 1)
    assert word in err
    assert not bringup.folder.exists()


def test_a_rung_without_a_counterpart_is_not_counted_as_passed(bringup, trial):
    trial(lambda model: WholeLayers(ReferenceExecutor(model)))
    code, out, _ = bringup(*SHORT)
    assert code == 0
    assert out.splitlines()[-2] == "passed: 7 of 8 rungs, not on this executor: long-decode"


# -- The rehearsal -----------------------------------------------------------------------------------------------------------


@with_pypto
@pytest.mark.npu_long
def test_a_wrong_byte_of_a_program_fails_its_rung(bringup, monkeypatch):
    call = SimRunner.call

    def wrong(self, program, tensors):
        call(self, program, tensors)
        names = [argument.name for argument in program.arguments]
        if "slot" in names:  # of the cache, a byte that was just written
            by_name = dict(zip(names, tensors, strict=True))
            block, offset = divmod(int(by_name["slot"].flatten()[0]), 128)
            by_name["k_codes"].view(-1, 2, 128, 64)[block, 1, offset, 3] += 64

    monkeypatch.setattr(SimRunner, "call", wrong)
    code, out, _ = bringup("--device", "sim", "--model", "tiny", executor="npu")
    assert (code, out.splitlines()[-2].split(";")[0]) == (1, "failed: layer at tq4, layer 0, store_kv.k")


@with_pypto
@pytest.mark.npu_long
def test_the_rehearsal_climbs_every_rung_in_the_simulator(tmp_path, capsys):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 128, "num_key_value_heads": 1}
    model = write_checkpoint(tmp_path / "model", config=sizes)
    args = ["--prompt", "def main(argv):", "--max-new-tokens", "2", "--threads", "1"]
    code = main(["dev", "bringup", "--device", "sim", "--model", str(model), "--out", str(tmp_path / "out"), *args])
    out = capsys.readouterr().out
    assert code == 0, out
    assert out.splitlines()[-2] == "passed: 8 of 8 rungs"
    last = rung_reports(tmp_path / "out")["latency"]["found"]
    assert "times mean nothing and none is given" in last["said"]
    assert not [name for name in last["facts"] if " at " in name]


# -- Learned formats and plans ------------------------------------------------------------------------------------------------


def test_a_card_runs_the_first_layer_again_and_again(bringup, trial, monkeypatch):
    """A difference that lies within rounding is found by running the layer again, and only so."""
    runs = []

    def now_and_then(*args):
        runs.append(None)
        return reference.silu_mul(*args) * (1 + 2.0**-20 * (len(runs) % 3 == 0))

    trial(with_ops(silu_mul=now_and_then))
    monkeypatch.setattr(Workbench, "repeats", 4)
    failed_at(bringup, "layer", "differs from itself")


def test_learned_formats_and_plans_climb_every_rung(bringup, tmp_path, checkpoint):
    plan = write_calibration(tmp_path / "mixed.safetensors", checkpoint, kv="k=lr3,v=tq4", layers={0: "k=tq4,v=tq3"})
    file = write_calibration(tmp_path / "made.safetensors", checkpoint)
    args = ("--kv", "k=lr3,v=tq3", "--calibration", str(file), "--kv-plan", str(plan), *SHORT)
    code, out, err = bringup(*args)
    assert code == 0, out + err
    rungs = rung_reports(bringup.folder)
    assert "of tq4, k=lr3,v=tq3, mixed at" in rungs["latency"]["found"]["said"]
