"""`tq plan` and the options of a KV plan: what is written, what reads it, what is refused."""

import json

import pytest

from haarkv.engine.loading import load as load_session
from haarkv.tq_ops import formats
from haarkv.tq_ops.kv import plan_file
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.fidelity import evaluation
from haarkv.validation.planning import search as planner

TEXT = "for spam in eggs:\n    print(spam, 'and', eggs)\n\nclass Knight:\n    says = 'Ni!'\n"
UNSEEN = "def bridge(name, quest):\n    if quest == 'grail':\n        return name\n    raise KeyError(quest)\n"
SHORT = ("--candidates", "tq2,tq4", "--tails", "0", "--context", "60", "--tokens", "60", "--verify-tokens", "60")
SHAPE = ModelShape.uniform(2, 2, 32, 64, 257)


@pytest.fixture
def tq(run, tmp_path, checkpoint):
    """Runs a command on the small checkpoint, in a folder with two texts and a plan."""
    (tmp_path / "text.txt").write_text(TEXT * 2, encoding="utf-8")
    (tmp_path / "unseen.txt").write_text(UNSEEN, encoding="utf-8")
    plan_file.save(tmp_path / "plan.json", KVSpec("tq4", layers={1: "k=tq8,v=tq2"}, tail=3).plan(2), SHAPE)

    return lambda command, *args: run(command, "--model", checkpoint, *args)


# -- tq plan ----------------------------------------------------------------------------------------------------------------
def plan(tq, *args):
    return tq("plan", "--text", "text.txt", "--verify", "unseen.txt", "--budget", "3.5", "--out", "new.json", *SHORT, *args)


def test_a_plan_is_written_and_every_command_takes_it(tq, tmp_path, checkpoint):
    code, out, err = plan(tq)
    assert (code, err) == (0, "")
    assert "60 unseen tokens in 1 window of 60" in out
    assert "so few tokens show large differences only" in out
    assert "nearer in 1 of 1 window\n" in out
    assert "the plan beats tq2 by" in out
    assert "tq4" in out
    assert "written to new.json" in out
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
    result = tq("eval", *files, "--window", 60, "--tokens", 60, "--json")
    rows = json.loads(result[1])["rows"]
    assert [row["kv"] for row in rows] == ["tq4", "new"]
    assert rows[1]["kl_mean"] == report["verified"][0]["kl_mean"]
    assert tq("generate", "--kv-plan", "new.json", "--prompt", "def", "--max-new-tokens", 3, "--json")[0] == 0
    code, out, _ = tq("validate", "--executor", "reference", "--kv-plan", "new.json", "--prompt", "def", "--steps", 1)
    assert code == 0, out


def test_json_says_what_the_file_says(tq, tmp_path):
    code, out, err = plan(tq, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report.pop("plan") == "new.json"
    assert report == json.loads((tmp_path / "new.json").read_text())["measured"]


def test_without_another_text_the_second_half_judges(tq, tmp_path):
    for name, text in (("both", TEXT + TEXT.upper()), ("first", TEXT), ("second", TEXT.upper())):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    args = ("--budget", "3.5", "--out", "new.json", *SHORT, "--context", len(TEXT) - 1, "--tokens", 200, "--json")
    whole = json.loads(tq("plan", "--text", "both.txt", *args)[1])
    separate = json.loads(tq("plan", "--text", "first.txt", "--verify", "second.txt", *args)[1])
    assert whole == separate
    assert whole["verified_tokens"] == len(TEXT) - 1


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
        patch.setattr(planner, "verify", stop)
        assert plan(tq, "--resume", "run.json")[0] == 130
    assert (tmp_path / "new.json").read_text() == "old"
    assert set(tmp_path.iterdir()) == before | {tmp_path / "run.json"}
    right, names = evaluation.score_window, []
    monkeypatch.setattr(evaluation, "score_window", lambda name, *rest: names.append(name) or right(name, *rest))
    code, out, _ = plan(tq, "--resume", "run.json")
    assert code == 0
    assert [name for name in names if " of layer " in name] == [] != names  # no place is measured again
    assert "written" in out
