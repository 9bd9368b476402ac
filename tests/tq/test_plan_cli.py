"""`tq plan` and the options of a KV plan: what is written, what reads it, what is refused."""

import json

import pytest
from checkpoints import write_checkpoint
from refusals import assert_refused

from haarkv.engine.loading import load as load_session
from haarkv.tq_ops import formats
from haarkv.tq_ops.kv import plan_file
from haarkv.tq_ops.kv.plan import KVSpec, ModelShape
from haarkv.validation.planning import candidates, planner
from tq.cli import main

TEXT = "for spam in eggs:\n    print(spam, 'and', eggs)\n\nclass Knight:\n    says = 'Ni!'\n"
UNSEEN = "def bridge(name, quest):\n    if quest == 'grail':\n        return name\n    raise KeyError(quest)\n"
SHORT = ("--candidates", "tq2,tq4", "--tails", "0", "--context", "60", "--tokens", "60", "--verify-tokens", "60")
SHAPE = ModelShape.uniform(2, 2, 32, 64, 257)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("plan") / "checkpoint")


@pytest.fixture
def tq(capsys, tmp_path, monkeypatch, checkpoint):
    """Runs a command on the small checkpoint, in a folder with two texts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT * 2, encoding="utf-8")
    (tmp_path / "unseen.txt").write_text(UNSEEN, encoding="utf-8")
    (tmp_path / "other.json").write_text(
        plan_file.dumps(KVSpec("tq4").plan(2), ModelShape.uniform(2, 2, 32, 80, 257)), encoding="utf-8"
    )
    (tmp_path / "plan.json").write_text(
        plan_file.dumps(KVSpec("tq4", layers={1: "k=tq8,v=tq2"}, tail=3).plan(2), SHAPE), encoding="utf-8"
    )

    def run(command, *args):
        code = main([command, "--model", str(checkpoint), *map(str, args)])
        return code, *capsys.readouterr()

    return run


# -- tq plan ----------------------------------------------------------------------------------------------------------------
def plan(tq, *args):
    return tq("plan", "--text", "text.txt", "--verify", "unseen.txt", "--budget", "3.5", "--out", "new.json", *SHORT, *args)


def test_a_plan_is_written_and_every_command_takes_it(tq, tmp_path, checkpoint):
    code, out, err = plan(tq)
    assert (code, err) == (0, "")
    assert "unseen tokens in 1 windows of 60" in out
    assert "the plan beats tq2 by" in out
    assert "tq4" in out
    assert "written to new.json" in out
    content = json.loads((tmp_path / "new.json").read_text())
    chosen = [formats.parse(spec) for spec in content["layers"]]
    assert sorted(f.name for pair in chosen for f in pair) == ["tq2", "tq2", "tq4", "tq4"]
    measured = content["measured"]
    assert measured["verified"][0]["bits_per_value"] == 3.5
    assert measured["verified"][0]["kl_mean"] < measured["verified"][1]["kl_mean"]
    assert measured["costs"].keys() == {f"layer {layer} {side}" for layer in (0, 1) for side in "kv"}

    session = load_session(str(checkpoint), kv=plan_file.load(tmp_path / "new.json"))
    assert list(session.plan.layers) == chosen
    files = ("--text", "unseen.txt", "--kv", "tq4", "--kv-plan", "new.json")
    evaluated = tq("eval", *files, "--greedy-prompts", 0, "--window", 60, "--tokens", 60, "--json")
    rows = json.loads(evaluated[1])["rows"]
    assert [row["kv"] for row in rows] == ["tq4", "new"]
    assert rows[1]["kl_mean"] == measured["verified"][0]["kl_mean"]
    assert tq("generate", "--kv-plan", "new.json", "--prompt", "def", "--max-new-tokens", 3, "--json")[0] == 0
    code, out, _ = tq("validate", "--executor", "reference", "--kv-plan", "new.json", "--prompt", "def", "--steps", 1)
    assert code == 0, out


def test_json_says_what_the_file_says(tq, tmp_path):
    code, out, err = plan(tq, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found.pop("plan") == "new.json"
    assert found == json.loads((tmp_path / "new.json").read_text())["measured"]


def test_without_another_text_the_second_half_judges(tq, tmp_path):
    for name, text in (("both", TEXT + TEXT.upper()), ("first", TEXT), ("second", TEXT.upper())):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    args = ("--budget", "3.5", "--out", "new.json", *SHORT, "--context", len(TEXT) - 1, "--tokens", 200, "--json")
    whole = json.loads(tq("plan", "--text", "both.txt", *args)[1])
    apart = json.loads(tq("plan", "--text", "first.txt", "--verify", "second.txt", *args)[1])
    assert whole == apart
    assert whole["verified_tokens"] == len(TEXT) - 1


def test_the_tail_is_the_one_whose_plan_is_nearest_as_a_whole(tq, tmp_path):
    (tmp_path / "long.txt").write_text(TEXT * 9, encoding="utf-8")
    files = ("--text", "long.txt", "--verify", "long.txt", "--context", len(TEXT) * 9 - 1)
    for tails in ("0,8", "8,0"):
        code, out, _ = plan(tq, *files, "--budget", 4.2, "--tails", tails, "--json")
        assert code == 0
        found = json.loads(out)
        rows = {row["kv"]: row["kl_mean"] for row in found["calibration"]}
        assert len(rows) == len(set(rows.values())) == 2
        chosen = plan_file.load(tmp_path / "new.json").plan(2)
        assert chosen.describe() == min(rows, key=lambda kv: rows[kv])
        assert all(row["bits_per_value"] <= 4.2 for row in found["calibration"])


def test_what_beats_no_uniform_format_is_written_by_force_only(tq, tmp_path):
    code, out, err = plan(tq, "--candidates", "tq2")
    assert (code, err) == (1, "")
    assert "has the same mean KL as tq2" in out
    assert "new.json is not written, because tq2 of the same bytes is no worse; --force writes it" in out
    assert not (tmp_path / "new.json").exists()
    code, out, _ = plan(tq, "--candidates", "tq2", "--force")
    assert code == 0
    assert "written to new.json, though tq2 of the same bytes is no worse" in out
    assert json.loads((tmp_path / "new.json").read_text())["layers"] == ["tq2", "tq2"]


def test_an_interrupt_leaves_the_old_plan_and_what_was_measured(tq, tmp_path, monkeypatch):
    (tmp_path / "new.json").write_text("old")
    before = set(tmp_path.iterdir())

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(candidates, "verify", stop)
        assert plan(tq, "--resume", "run.json")[0] == 130
    assert (tmp_path / "new.json").read_text() == "old"
    assert set(tmp_path.iterdir()) == before | {tmp_path / "run.json"}
    monkeypatch.setattr(planner, "score_window", None)  # nothing of it is measured again
    code, out, _ = plan(tq, "--resume", "run.json")
    assert code == 0
    assert "written" in out


REFUSED = {
    "budget_below": (["--budget", "2.4"], ["2.4 bits", "smallest takes 2.5"]),
    "budget_above": (["--budget", "16"], ["--budget", "below bf16's 16"]),
    "budget_word": (["--budget", "four"], ["--budget", "'four'"]),
    "budget_nan": (["--budget", "nan"], ["--budget"]),
    "unknown_format": (["--candidates", "tq4,tq9"], ["tq9", "choose from"]),
    "empty_candidate": (["--candidates", "tq4,"], ["unknown KV format"]),
    "no_candidate": (["--candidates", ""], ["unknown KV format ''"]),
    "groups": (["--candidates", "kivi2"], ["kivi2", "groups"]),
    "head_dim": (["--candidates", "tbq4_0"], ["tbq4_0", "head_dim 32"]),
    "tail": (["--tails", "8,x"], ["--tails", "8,x"]),
    "long_tail": (["--tails", "0,99999"], ["tail or sink of 99,999 tokens"]),
    "long_sink": (["--sinks", "0,99999"], ["tail or sink of 99,999 tokens"]),
    "context_beyond": (["--context", "1025"], ["context of 1024", "--context"]),
    "context_beyond_the_text": (["--context", "100"], ["too short", "101"]),
    "one_file_for_both": (["--resume", "new.json"], ["same file"]),
    "resume": (["--resume", "text.txt"], ["no partial result"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_cannot_be_made_is_one_line_and_2(tq, case):
    args, words = REFUSED[case]
    assert_refused(plan(tq, *args), *words)


# -- The options of a plan --------------------------------------------------------------------------------------------------
OPTIONS = {
    "tail_word": (["--kv-tail", "many"], ["--kv-tail", "'many'"]),
    "sink_word": (["--kv-sink", "x"], ["--kv-sink", "'x'"]),
    "sink_negative": (["--kv-sink", "-2"], ["--kv-sink", "-2"]),
    "layer_absent": (["--kv-skip-layers", "99"], ["no layer 99"]),
    "layer_word": (["--kv-skip-layers", "x"], ["'x'", "--kv-skip-layers"]),
    "layer_twice": (["--kv-skip-layers", "1,-1"], ["layer 1 is named twice"]),
    "tail_shorter_than_a_group": (["--kv", "kivi2", "--kv-tail", "30"], ["kivi2", "tail=31"]),
    "plan_of_another_model": (["--kv-plan", "other.json"], ["another model", "hidden 80"]),
    "no_plan": (["--kv-plan", "text.txt"], ["text.txt is no KV plan"]),
    "plan_and_kv": (["--kv-plan", "plan.json", "--kv", "tq4"], ["--kv-plan", "leave out --kv"]),
    "plan_and_tail": (["--kv-plan", "plan.json", "--kv-tail", "3"], ["--kv-plan", "leave out --kv-tail"]),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_bad_option_is_one_line_and_2(tq, case):
    args, words = OPTIONS[case]
    assert_refused(tq("generate", "--prompt", "def", *args), *words)


@pytest.mark.parametrize("command", [["eval", "--text", "text.txt"], ["validate", "--prompt", "def"]], ids=lambda c: c[0])
def test_other_commands_refuse_a_plan_for_another_model(tq, command):
    assert_refused(tq(*command, "--kv-plan", "other.json"), "another model", "hidden 80")


def test_generate_takes_keys_in_groups_and_a_plan_with_a_tail(tq):
    code, out, err = tq("generate", "--kv", "kivi2", "--prompt", TEXT, "--max-new-tokens", 3, "--json")
    # Two bits of this model's K are worth a warning, and nothing else is said.
    assert (code, err.count("\n"), err.split(":")[:2]) == (0, 1, ["tq", " warning"])
    assert json.loads(out)["kv"]["format"] == "kivi2"
    code, out, _ = tq("generate", "--kv-plan", "plan.json", "--prompt", TEXT, "--max-new-tokens", 3, "--json")
    assert json.loads(out)["kv"]["format"] == "tq4; layer 1: k=tq8,v=tq2; tail 3"
