"""Layers that keep a state in place of K and V: what is said of them, and the trained hybrid that ships."""

import pytest
import torch
from family_models import cpu_logits
from planted import token_ids
from torch.nn.functional import cross_entropy

from haarkv.engine.draft_choice import DraftSpec
from haarkv.engine.drafts import Pace
from haarkv.engine.loading import load
from haarkv.engine.plans import plan_for
from haarkv.engine.sampling import Sampling
from haarkv.models.catalog import load_model
from haarkv.tq_ops.kv import plan_file
from haarkv.validation.planning import auto
from haarkv.validation.planning.calibrate import load_subject
from tq.cli import main

NAME = "tiny-hybrid"


def test_info_tells_a_state_from_k_and_v(capsys):
    assert main(["info", "random:qwen3.5-0.8b"]) == 0
    output = capsys.readouterr().out
    assert "24, 18 of them with a state in place of K and V" in output
    words = "20.2 MB a sequence, whatever its length; kept 2 times, 40.4 MB; with --draft once more for each drafted token"
    assert words in output
    assert main(["info", "random:0.6b"]) == 0
    assert "state" not in capsys.readouterr().out


# -- The hybrid that ships ---------------------------------------------------------------------------------------------------


def test_it_has_learned_python():
    """A model of random weights has 8.3 nats a token. What is judged is what the weights say, and not a figure of training."""
    ids = list(token_ids(513))
    assert float(cross_entropy(cpu_logits(load_model(NAME), ids[:-1]), torch.tensor(ids[1:]))) < 4.0


def test_its_own_drafts_are_often_right_and_never_change_the_text(monkeypatch):
    monkeypatch.setattr(Pace, "tokens", lambda self, *_: self._most)  # what is gained depends on the clock
    prompts = [list(token_ids(1560)[start : start + 60]) for start in (0, 700, 1500)]
    texts = []
    for draft in (None, DraftSpec("mtp", 2)):
        result = load(NAME, executor="cpu", draft=draft).generate(prompts, max_new_tokens=40, sampling=Sampling())
        texts.append([done.token_ids for done in result.completions])
    assert texts[0] == texts[1]
    assert result.drafting.accepted > 0.3 * result.drafting.proposed > 0


# -- Learned keys of the one layer that has some ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def choice():
    return auto.choose(load_subject(NAME))


def test_a_cache_is_chosen_for_the_layer_that_has_keys(choice):
    assert {layer for layer, _ in choice.costs} == {3}
    assert [basis is None for basis in choice.file.calibration.k] == [True, True, True, False]
    assert choice.row.kl_mean <= auto.LOSS
    plan = plan_for(choice.spec, choice.config)
    assert plan.k(3).name.startswith("lr")
    assert plan.summary() == f"k={plan.k(3).name},v={plan.v(3).name}; tail 124; sink 4"


def test_its_chosen_cache_passes_the_validator(choice, tmp_path):
    path, text = tmp_path / "plan.safetensors", tmp_path / "text.py"
    plan_file.save(path, plan_for(choice.spec, choice.config), choice.file.shape, {}, choice.file)
    text.write_text("def main(values):\n    return [value + 1 for value in values]\n" * 9)
    args = ["validate", "-m", NAME, "--executor", "cpu", "--kv-plan", str(path), "--prompt-file", str(text), "--steps", "1"]
    assert main(args) == 0
