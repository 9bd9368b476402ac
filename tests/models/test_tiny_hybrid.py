"""The trained hybrid that ships: beside transformers, as a GGUF file, and what its own drafts are worth."""

import pytest
import torch
from family_models import in_gguf, logits_of
from said_again import always_drafting
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers_judge import worst_error

import tq
from haarkv.engine.draft_choice import DraftSpec
from haarkv.engine.loading import load
from haarkv.engine.sampling import Sampling
from haarkv.models.catalog import load_model, path_of
from haarkv.models.tiny_qwen3.corpus import held_out_texts

__all__ = ["in_gguf"]
NAME = "tiny-hybrid"


@pytest.fixture(scope="module")
def text():
    return tq.load("tiny").tokenizer.encode(held_out_texts()["fractions.py"])


@pytest.fixture(scope="module")
def theirs():
    return AutoModelForCausalLM.from_pretrained(path_of(NAME), dtype=torch.float32, attn_implementation="eager").eval()


def test_logits_are_those_of_transformers(text, theirs):
    prompt = torch.tensor([text[:120]])
    worst, _ = worst_error(theirs, load_model(NAME), "fp32", prompt, steps=16)
    assert worst <= 1e-4


def test_it_has_learned_python(text):
    """A model of random weights has 8.3 nats a token. What is judged is what the weights say, and not a figure of training."""
    assert float(cross_entropy(logits_of(load_model(NAME), text[:512]), torch.tensor(text[1:513]))) < 4.0


def test_its_own_drafts_are_often_right_and_never_change_the_text(text):
    prompts = [text[start : start + 60] for start in (0, 700, 1500)]
    texts = []
    for draft in (None, DraftSpec("mtp", 2)):
        with always_drafting():
            result = load(NAME, executor="cpu", draft=draft).generate(prompts, max_new_tokens=40, sampling=Sampling())
        texts.append([done.token_ids for done in result.completions])
    assert texts[0] == texts[1]
    assert result.drafting.accepted > 0.3 * result.drafting.proposed > 0


def test_a_gguf_file_of_it_has_its_weights(in_gguf):
    ours, read = load_model(NAME), load_model(in_gguf)
    for (name, one), (_, other) in zip(ours.weights.named(), read.weights.named(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)
