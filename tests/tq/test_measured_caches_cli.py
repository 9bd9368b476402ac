"""`tq eval`, `tq plan`, `tq calibrate` and `tq choice`: what they print and write, and the commands that take their files."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import EMBEDDING, write_checkpoint
from refusals import assert_refused

from haarkv.engine.loading import load as load_session
from haarkv.engine.plans import plan_for, shape_signature
from haarkv.models.catalog import read_config
from haarkv.tq_ops import formats
from haarkv.tq_ops.kv import calibration_file, plan_file
from haarkv.validation.fidelity import evaluation
from haarkv.validation.fidelity.setup import parse_list
from haarkv.validation.planning import choice_cache, common_text
from haarkv.validation.planning import search as planner
from tq.cli import main

TEXT = "for spam in eggs:\n    print(spam, 'and', eggs)\n\nclass Knight:\n    says = 'Ni!'\n"
UNSEEN = "def bridge(name, quest):\n    if quest == 'grail':\n        return name\n    raise KeyError(quest)\n"
PROSE = Path(common_text.__file__).with_name("samples.txt").read_text(encoding="utf-8")
TEXTS = {"text": TEXT * 2, "unseen": UNSEEN, "prose": PROSE, "poor": "spam, spam, spam, eggs and spam\n" * 40}
LEARN = ("--tokens", "600", "--verify-tokens", "60", "--window", "60")


@pytest.fixture(scope="module")
def calibration_bytes(tmp_path_factory, checkpoint):
    """A calibration of the small checkpoint."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "prose.txt").write_text(PROSE, encoding="utf-8")
    args = ("--model", checkpoint, "--text", folder / "prose.txt", "--out", folder / "learned.safetensors", *LEARN, "--force")
    assert main(["calibrate", *map(str, args)]) == 0
    return (folder / "learned.safetensors").read_bytes()


@pytest.fixture
def tq(run, capsys, tmp_path, checkpoint, calibration_bytes):
    """Runs a command on the small checkpoint, in a folder with texts and a calibration."""
    for name, text in TEXTS.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "learned.safetensors").write_bytes(calibration_bytes)
    capsys.readouterr()
    return lambda command, *args: run(*command.split(), "--model", checkpoint, *args)


# -- tq eval ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["tq4"], ["tq4"]),
        (["tq4,tq2", "q8_0"], ["tq4", "tq2", "q8_0"]),
        (["k=q8_0,v=tq4"], ["k=q8_0,v=tq4"]),
        (["bf16, k=q8_0,v=tq4 ,tq2"], ["bf16", "k=q8_0,v=tq4", "tq2"]),
        (["k=q8_0,v=tq4,k=bf16,v=tq2"], ["k=q8_0,v=tq4", "k=bf16,v=tq2"]),
        (["v=tq4,k=q8_0", "k=tq2,v=tq2", "tq2"], ["k=q8_0,v=tq4", "tq2"]),
        ([], []),
    ],
)
def test_a_list_of_formats(specs, names):
    assert parse_list(specs) == names


EVAL = ("eval", "--text", "text.txt", "--threads", "1")
SHORT = (*EVAL, "--kv", "bf16,k=q8_0,v=tq2,tq4", "--window", "40", "--tokens", "60")


def test_eval_json_has_the_promised_keys(tq):
    report = json.loads(tq(*SHORT, "--json").shows())
    assert report.keys() == {"model", "text", "dtype", "tokens", "windows", "window", "rows"}
    assert (report["tokens"], report["windows"], report["window"]) == (60, 2, 40)
    assert [r["kv"] for r in report["rows"]] == ["bf16", "k=q8_0,v=tq2", "tq4"]
    for r in report["rows"]:
        assert r.keys() == {
            "kv", "bytes_per_token", "bits_per_value", "kl_mean", "kl_median", "kl_p999", "top1", "rms_dp", "ppl",
            "ppl_delta",
        }  # fmt: skip
    assert report["rows"][0]["kl_p999"] == 0 < report["rows"][2]["kl_mean"] < report["rows"][1]["kl_mean"]


def test_words_and_resume(tq):
    resumed = (*SHORT, "--resume", "run.json")
    out = tq(*resumed).shows("60 tokens", "2 windows of 40", "k=q8_0,v=tq2", "largest")  # 60 positions have no 99.9 %
    assert all(len(line) <= 140 for line in out.splitlines())
    assert tq(*resumed).ended() == out
    assert_refused(tq(*resumed, "--window", 41), "another windows")


def test_a_narrow_terminal_gets_two_tables(tq, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    out = re.sub(r"\x1b\[[0-9;]*m", "", tq(*EVAL, "--kv", "k=q8_0,v=tq2,tq4", "--window", "9", "--tokens", "9").ended())
    lines = [line.rstrip() for line in out.splitlines()[1:]]
    assert max(map(len, lines)) <= 80
    assert sum("k=q8_0,v=tq2" in line for line in lines) == 2
    assert all(column in out for column in ("bytes/token", "KL mean", "same top", "RMS Δp", "ΔPPL"))


# -- tq plan ----------------------------------------------------------------------------------------------------------------

PLAN = (
    "plan", "--budget", "3.5", "--out", "new.json", "--candidates", "tq2,tq4", "--tails", "0", "--context", "60",
    "--tokens", "60", "--verify-tokens", "60",
)  # fmt: skip
JUDGED = (*PLAN, "--text", "text.txt", "--verify", "unseen.txt")


def test_a_plan_is_written_and_every_command_takes_it(tq, tmp_path, checkpoint):
    tq(*JUDGED).shows(
        "60 unseen tokens in 1 window of 60", "so few tokens show large differences only", "nearer in 1 of 1 window\n",
        "the plan beats tq2 by", "tq4", "written to new.json",
    )  # fmt: skip
    content = json.loads((tmp_path / "new.json").read_text())
    pairs = [formats.parse(spec) for spec in content["layers"]]
    assert sorted(f.name for pair in pairs for f in pair) == ["tq2", "tq2", "tq4", "tq4"]
    report = content["measured"]
    assert report["verified"][0]["bits_per_value"] == 3.5
    assert report["verified"][0]["kl_mean"] < report["verified"][1]["kl_mean"]
    assert report["costs"].keys() == {f"layer {layer} {side}" for layer in (0, 1) for side in "kv"}
    session = load_session(str(checkpoint), kv=plan_file.load(tmp_path / "new.json"))
    assert list(session.plan.layers) == pairs
    files = ("--text", "unseen.txt", "--kv", "tq4", "--kv-plan", "new.json")
    rows = tq("eval", *files, "--window", 60, "--tokens", 60, "--json").json["rows"]
    assert [row["kv"] for row in rows] == ["tq4", "new"]
    assert rows[1]["kl_mean"] == report["verified"][0]["kl_mean"]
    assert tq("generate", "--kv-plan", "new.json", "--prompt", "def", "--max-new-tokens", 3, "--json").json
    tq("validate", "--executor", "reference", "--kv-plan", "new.json", "--prompt", "def", "--steps", 1).ended()


def test_json_says_what_the_file_says(tq, tmp_path):
    report = json.loads(tq(*JUDGED, "--json").shows())
    assert report.pop("plan") == "new.json"
    assert report == json.loads((tmp_path / "new.json").read_text())["measured"]


def test_without_another_text_the_second_half_judges(tq, tmp_path):
    for name, text in (("both", TEXT + TEXT.upper()), ("first", TEXT), ("second", TEXT.upper())):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    args = (*PLAN, "--context", len(TEXT) - 1, "--tokens", 200, "--json", "--text")
    whole = tq(*args, "both.txt").json
    assert whole == tq(*args, "first.txt", "--verify", "second.txt").json
    assert whole["verified_tokens"] == len(TEXT) - 1


def test_an_interrupt_leaves_the_old_plan_and_what_was_measured(tq, tmp_path, monkeypatch):
    (tmp_path / "new.json").write_text("old")
    before = set(tmp_path.iterdir())

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(planner, "verify", stop)
        assert tq(*JUDGED, "--resume", "run.json").code == 130
    assert (tmp_path / "new.json").read_text() == "old"
    assert set(tmp_path.iterdir()) == before | {tmp_path / "run.json"}
    right, names = evaluation.score_window, []
    monkeypatch.setattr(evaluation, "score_window", lambda name, *rest: names.append(name) or right(name, *rest))
    assert "written" in tq(*JUDGED, "--resume", "run.json").ended()
    assert [name for name in names if " of layer " in name] == [] != names  # no place is measured again


# -- tq calibrate -----------------------------------------------------------------------------------------------------------

CALIBRATE = ("calibrate", "--verify", "unseen.txt", "--out", "new.safetensors", *LEARN)


def test_a_calibration_is_judged_written_and_taken(tq, tmp_path):
    report = json.loads(tq(*CALIBRATE, "--text", "prose.txt", "--json").shows())
    file = calibration_file.load(tmp_path / "new.safetensors")
    assert report["digest"] == file.calibration.digest
    assert (report["tokens"], report["verified_tokens"]) == (600, 60)
    assert {key: report[key] for key in file.learned} == file.learned
    tq4, lr4 = report["verified"]
    assert (tq4["kv"], lr4["kv"]) == ("tq4", "k=lr4,v=tq4")
    assert tq4["bytes_per_token"] == lr4["bytes_per_token"]
    assert lr4["kl_mean"] < tq4["kl_mean"]
    again = tq(*CALIBRATE, "--text", "prose.txt", "--out", "again.safetensors")
    again.shows("learned from 600 tokens; errors cost", "written to again.safetensors")
    assert calibration_file.load(tmp_path / "again.safetensors").calibration.digest == file.calibration.digest


def test_without_a_text_it_learns_from_the_one_that_auto_reads(tq, monkeypatch):
    sizes, read = [], common_text.common_text

    def reading(tokenizer, tokens):
        sizes.append(tokens)
        return read(tokenizer, tokens)

    monkeypatch.setattr(common_text, "common_text", reading)
    assert json.loads(tq("calibrate", "--out", "own.safetensors", *LEARN, "--force", "--json").shows())["tokens"] == 600
    assert sizes == [600 + 1 + 60 + 1]


@pytest.mark.parametrize(
    ("command", "words", "forced_words"),
    [
        ((*JUDGED, "--candidates", "tq2"),
         ("has the same mean KL as tq2",
          "new.json is not written, because tq2 of the same bytes is no worse; --force writes it"),
         "written to new.json, though tq2 of the same bytes is no worse"),
        # A few words that repeat teach nothing of other text.
        ((*CALIBRATE, "--text", "poor.txt"),
         ("new.safetensors is not written: on unseen text k=lr4,v=tq4", "give more --text, or --force"), "more text helps"),
    ],
    ids=["plan", "calibrate"],
)  # fmt: skip
def test_what_is_no_better_is_written_by_force_only(tq, tmp_path, command, words, forced_words):
    before = set(tmp_path.iterdir())
    tq(*command).shows(*words, code=1)
    assert json.loads(tq(*command, "--json").ended(1))["plan" if command[0] == "plan" else "calibration"] is None
    assert set(tmp_path.iterdir()) == before
    assert forced_words in tq(*command, "--force").ended()
    assert len(set(tmp_path.iterdir()) - before) == 1


LEARNED = ("--calibration", "learned.safetensors")


def test_eval_and_generate_take_learned_formats(tq):
    ran = tq(*EVAL, *LEARNED, "--text", "unseen.txt", "--tokens", 60, "--json", "--kv", "k=lr3,v=tq3,k=lr4,v=tq4,tq4")
    rows = {row["kv"]: row for row in json.loads(ran.shows())["rows"]}
    assert rows.keys() == {"k=lr3,v=tq3", "k=lr4,v=tq4", "tq4"}
    assert 2 * rows["k=lr4,v=tq4"]["kl_mean"] < rows["k=lr3,v=tq3"]["kl_mean"]
    prompt = ("--kv", "k=lr3,v=tq4", "--prompt", "def", "--max-new-tokens", 3, "--json")
    assert tq("generate", *LEARNED, *prompt).json["kv"]["format"] == "k=lr3,v=tq4"


def test_a_plan_and_its_calibration_become_one_file(tq, tmp_path, checkpoint):
    args = (*LEARNED, "--text", "prose.txt", "--verify", "unseen.txt", "--out", "plan.safetensors", "--budget", 5.0, "--force")
    short = ("--tails", "0,4", "--sinks", "0,2", "--context", 60, "--tokens", 60, "--verify-tokens", 60)
    tq("plan", *args, *short).shows("written to plan.safetensors")
    spec = plan_file.load(tmp_path / "plan.safetensors")
    assert {kv_format.name[:2] for kv_format, _ in spec.plan(2).layers} == {"lr"}
    assert spec.calibration.digest == calibration_file.load(tmp_path / "learned.safetensors").calibration.digest
    assert load_session(str(checkpoint), kv=spec).plan.describe() == spec.plan(2).describe()
    planned = ("--kv-plan", "plan.safetensors", "--json")
    rows = tq("eval", "--text", "unseen.txt", "--kv", "tq4", "--tokens", 60, *planned).json["rows"]
    assert [row["kv"] for row in rows] == ["tq4", "plan"]
    assert rows[1]["bits_per_value"] <= 5.0
    assert tq("generate", "--prompt", "def", "--max-new-tokens", 2, *planned).json


@pytest.mark.parametrize(
    ("args", "words"), [((), "tail 124; sink 4"), (("--kv-sink", 0), "tail 124"), (("--kv-tail", 0, "--kv-sink", 0), "tail 0")]
)
def test_a_tail_or_sinks_of_0_are_none(tq, args, words):
    ran = tq("generate", *LEARNED, "--prompt", "ab", "--max-new-tokens", 2, "--json", *args)
    assert ran.json["kv"]["format"] == f"k=lr4,v=tq4; {words}"


# -- tq choice --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def plan_of_checkpoint(tmp_path, checkpoint, calibration_bytes):
    """A plan with learned keys, as a choice is."""
    (tmp_path / "learned.safetensors").write_bytes(calibration_bytes)
    source, config = calibration_file.load(tmp_path / "learned.safetensors"), read_config(str(checkpoint))
    path = tmp_path / "plan.safetensors"
    plan_file.save(path, plan_for(replace(source.spec, kv="k=lr4,v=tq5"), config), shape_signature(config), source=source)
    return path


@pytest.mark.chooses
def test_a_choice_goes_from_one_home_to_another(tq, tmp_path, plan_of_checkpoint, monkeypatch):
    for home, given, taken in (("one", plan_of_checkpoint, "a.safetensors"), ("two", "a.safetensors", "b.safetensors")):
        monkeypatch.setattr(choice_cache, "home", lambda home=home: tmp_path / home)
        tq("choice import", given).shows("takes k=lr4,v=tq5")
        tq("choice export", taken).shows("k=lr4,v=tq5", "MB")
        assert (tmp_path / taken).read_bytes() == plan_of_checkpoint.read_bytes()
        ran = tq("generate", "--kv", "auto", "--prompt", "def", "--max-new-tokens", 2, "--json")
        assert (ran.json["kv"]["format"], ran.err) == ("k=lr4,v=tq5", "")


def test_a_choice_of_something_else_is_refused(run, tmp_path, plan_of_checkpoint, monkeypatch):
    monkeypatch.setattr(choice_cache, "home", lambda: tmp_path / "home")
    other = write_checkpoint(tmp_path / "other", mutate=lambda tensors: tensors[EMBEDDING].neg_())
    half = tmp_path / "half.safetensors"
    half.write_bytes(plan_of_checkpoint.read_bytes()[:-100])
    for model, file, words in (
        ("tiny", plan_of_checkpoint, "was made for another model"),
        (other, plan_of_checkpoint, "was learned from other weights"),
        (other, half, "half.safetensors is no KV plan"),
        (other, tmp_path / "learned.safetensors", "is a calibration without a plan"),
    ):
        assert_refused(run("choice", "import", "--model", model, file), words)
    assert not (tmp_path / "home").exists()
