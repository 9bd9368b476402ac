"""`tq calibrate`, and what takes its file: what is written, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import layer_tensor, write_checkpoint
from refusals import assert_refused

from haarkv.engine.loading import load as load_session
from haarkv.models.weights import fingerprint
from haarkv.tq_ops.kv import calibration_file, plan_file
from haarkv.validation.planning import common_text
from tq.cli import main

TEXT = Path(common_text.__file__).with_name("prose.txt").read_text(encoding="utf-8")
POOR = "spam, spam, spam, eggs and spam\n" * 40
UNSEEN = "def bridge(name, quest):\n    if quest == 'grail':\n        return name\n    raise KeyError(quest)\n"
SHORT = ("--tokens", "600", "--verify-tokens", "60", "--window", "60")


@pytest.fixture(scope="module")
def calibration_bytes(tmp_path_factory, checkpoint):
    """A calibration of the small checkpoint."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    out = folder / "it.safetensors"
    args = ["--model", checkpoint, "--text", folder / "text.txt", "--out", out, *SHORT, "--force"]
    assert main(["calibrate", *map(str, args)]) == 0
    return out.read_bytes()


@pytest.fixture
def tq(run, capsys, tmp_path, checkpoint, calibration_bytes):
    """Runs a command on the small checkpoint, in a folder with two texts and a calibration."""
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "unseen.txt").write_text(UNSEEN, encoding="utf-8")
    (tmp_path / "it.safetensors").write_bytes(calibration_bytes)
    capsys.readouterr()

    return lambda command, *args: run(command, "--model", checkpoint, *args)


def calibrate(tq, *args):
    return tq("calibrate", "--text", "text.txt", "--verify", "unseen.txt", "--out", "new.safetensors", *SHORT, *args)


# -- What is written ------------------------------------------------------------------------------------------------------
def test_a_calibration_is_judged_written_and_taken(tq, tmp_path):
    code, out, err = calibrate(tq, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    file = calibration_file.load(tmp_path / "new.safetensors")
    assert report["digest"] == file.calibration.digest
    assert (report["tokens"], report["verified_tokens"]) == (600, 60)
    assert {key: report[key] for key in file.learned} == file.learned
    tq4, lr4 = report["verified"]
    assert (tq4["kv"], lr4["kv"]) == ("tq4", "k=lr4,v=tq4")
    assert tq4["bytes_per_token"] == lr4["bytes_per_token"]
    assert lr4["kl_mean"] < tq4["kl_mean"]
    code, out, _ = calibrate(tq, "--out", "again.safetensors")
    assert code == 0
    assert "learned from 600 tokens; errors cost" in out
    assert "written to again.safetensors" in out
    assert calibration_file.load(tmp_path / "again.safetensors").calibration.digest == file.calibration.digest


def test_without_a_text_it_learns_from_the_one_that_auto_reads(tq, monkeypatch):
    sizes, read = [], common_text.common_text

    def reading(tokenizer, tokens):
        sizes.append(tokens)
        return read(tokenizer, tokens)

    monkeypatch.setattr(common_text, "common_text", reading)
    code, out, err = tq("calibrate", "--out", "own.safetensors", *SHORT, "--force", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["tokens"] == 600
    assert sizes == [600 + 1 + 60 + 1]


def test_eval_and_generate_take_learned_formats(tq):
    files = ("--text", "unseen.txt", "--calibration", "it.safetensors", "--tokens", 60, "--json")
    code, out, err = tq("eval", *files, "--kv", "k=lr3,v=tq3,k=lr4,v=tq4,tq4")
    assert (code, err) == (0, "")
    rows = {row["kv"]: row for row in json.loads(out)["rows"]}
    assert rows.keys() == {"k=lr3,v=tq3", "k=lr4,v=tq4", "tq4"}
    assert rows["k=lr4,v=tq4"]["kl_mean"] < rows["tq4"]["kl_mean"]
    prompt = ("--kv", "k=lr3,v=tq4", "--calibration", "it.safetensors", "--prompt", "def", "--max-new-tokens", 3, "--json")
    code, out, _ = tq("generate", *prompt)
    assert code == 0
    assert json.loads(out)["kv"]["format"] == "k=lr3,v=tq4"


def test_a_plan_and_its_calibration_become_one_file(tq, tmp_path, checkpoint):
    args = ("--calibration", "it.safetensors", "--text", "text.txt", "--verify", "unseen.txt", "--out", "plan.safetensors")
    short = ("--tails", "0,4", "--sinks", "0,2", "--context", 60, "--tokens", 60, "--verify-tokens", 60, "--force")
    code, out, err = tq("plan", *args, *short, "--budget", 5.0)
    assert (code, err) == (0, "")
    assert "written to plan.safetensors" in out
    spec = plan_file.load(tmp_path / "plan.safetensors")
    names = {f.name for f in spec.plan(2).formats}
    assert names
    assert {kv_format.name[:2] for kv_format, _ in spec.plan(2).layers} == {"lr"}
    assert spec.calibration.digest == calibration_file.load(tmp_path / "it.safetensors").calibration.digest
    assert load_session(str(checkpoint), kv=spec).plan.describe() == spec.plan(2).describe()
    files = ("--text", "unseen.txt", "--kv", "tq4", "--kv-plan", "plan.safetensors", "--tokens", 60)
    rows = json.loads(tq("eval", *files, "--json")[1])["rows"]
    assert [row["kv"] for row in rows] == ["tq4", "plan"]
    assert rows[1]["bits_per_value"] <= 5.0
    assert tq("generate", "--kv-plan", "plan.safetensors", "--prompt", "def", "--max-new-tokens", 2, "--json")[0] == 0


def test_a_cache_for_transformers_takes_the_file(tq, tmp_path, checkpoint):
    transformers = pytest.importorskip("transformers")
    from tq.hf.cache import TQCache

    file = calibration_file.load(tmp_path / "it.safetensors")
    plan_file.save(tmp_path / "plan.safetensors", replace(file.spec, kv="k=lr3,v=tq3").plan(2), file.shape, {}, file)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    cache = TQCache(model.config, plan=tmp_path / "plan.safetensors")
    ids = torch.tensor([list(TEXT.encode()[:40])])
    with torch.no_grad():
        exact, packed = model(ids).logits, model(ids, past_key_values=cache).logits
    assert repr(cache.layers[1]) == "TQLayer(1, k=lr3, v=tq3)"
    assert 0 < float((exact - packed).square().mean().sqrt()) < 0.5 * float(exact.std())
    assert fingerprint(model.state_dict().items()) == file.fingerprint


# -- What is not written --------------------------------------------------------------------------------------------------
def test_what_is_no_better_than_tq4_is_written_by_force_only(tq, tmp_path):
    """A few words that repeat teach nothing of other text."""
    (tmp_path / "poor.txt").write_text(POOR, encoding="utf-8")
    poor = ("calibrate", "--text", "poor.txt", "--verify", "unseen.txt", "--out", "new.safetensors", *SHORT)
    code, out, err = tq(*poor)
    assert (code, err) == (1, "")
    assert "new.safetensors is not written: on unseen text k=lr4,v=tq4" in out
    assert "give more --text, or --force" in out
    assert json.loads(tq(*poor, "--json")[1])["calibration"] is None
    assert not (tmp_path / "new.safetensors").exists()
    code, out, _ = tq(*poor, "--force")
    assert code == 0
    assert "more text helps" in out
    assert (tmp_path / "new.safetensors").exists()


@pytest.mark.parametrize(
    ("args", "words"), [((), "tail 124; sink 4"), (("--kv-sink", 0), "tail 124"), (("--kv-tail", 0, "--kv-sink", 0), "tail 0")]
)
def test_a_tail_or_sinks_of_0_are_none(tq, args, words):
    args = ("--calibration", "it.safetensors", "--prompt", "ab", "--max-new-tokens", 2, "--json", *args)
    assert tq("generate", *args).json["kv"]["format"] == f"k=lr4,v=tq4; {words}"


# -- Mistakes -------------------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_one_line_and_2(tq, tmp_path, calibration_bytes):
    (tmp_path / "bad.safetensors").write_bytes(calibration_bytes[:-7])
    for command in (
        ["generate", "--kv", "k=lr3,v=tq4", "--prompt", "def"],
        ["plan", "--text", "text.txt", "--budget", 4, "--out", "p"],
    ):
        assert_refused(tq(*command, "--calibration", "bad.safetensors"), "bad.safetensors is no calibration")


def test_a_file_of_ours_in_the_wrong_place_is_called_what_it_is(tq):
    generate = ("generate", "--prompt", "ab", "--max-new-tokens", 1)
    assert tq(*generate, "--save-cache", "stored").code == 0
    a_cache = "it is a stored cache, which --load-cache takes"
    for option, file, words in (
        ("--kv-plan", "stored", ("stored is no KV plan: ", a_cache)),
        ("--calibration", "stored", ("stored is no calibration: ", a_cache)),
        ("--load-cache", "it.safetensors", ("is no stored cache: ", "it is a calibration, which --calibration takes")),
        ("--kv-plan", "it.safetensors", ("is a calibration without a plan",)),
    ):
        assert_refused(tq(*generate, option, file), *words)


def test_another_models_file_is_one_line_and_2(tq, run, tmp_path):
    def mutate(tensors):
        tensors[layer_tensor(1, "mlp.up_proj")] *= 2

    other = write_checkpoint(tmp_path / "other", mutate=mutate)
    args = ["--calibration", "it.safetensors", "--kv", "k=lr3,v=tq4"]
    reason = "learned from other weights"
    assert_refused(run("generate", "--model", other, *args, "--prompt", "def"), reason, "tq calibrate")
    assert_refused(run("eval", "--model", other, *args, "--text", "unseen.txt"), reason)
    assert_refused(tq("generate", "--model", "tiny", *args, "--prompt", "def"), "made for another model", "hidden 256")
