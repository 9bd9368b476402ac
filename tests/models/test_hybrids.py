"""Layers that keep a state in place of K and V: what is said of them, and the trained hybrid that ships."""

import torch
from family_models import cpu_logits
from planted import token_ids
from torch.nn.functional import cross_entropy

from haarkv.engine.draft_choice import DraftSpec
from haarkv.engine.drafts import Pace
from haarkv.engine.loading import load
from haarkv.engine.sampling import Sampling
from haarkv.models.catalog import load_model
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
