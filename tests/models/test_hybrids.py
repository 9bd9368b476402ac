"""Layers that keep a state in place of K and V; and the trained hybrid that ships, beside transformers and as a file."""

import json

import pytest
import torch
from family_models import cpu_logits
from repeat_drafts import always_drafting
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM
from transformers_judge import worst_error

import tq
from haarkv.engine.draft_choice import DraftSpec
from haarkv.engine.loading import load
from haarkv.engine.sampling import Sampling
from haarkv.models.catalog import find_model, load_model, read_config
from haarkv.models.config import Attention
from haarkv.models.layer import DeltaNet
from haarkv.models.parallel import Split
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops.errors import InputError
from tq.cli import main

NAME = "tiny-hybrid"


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


def test_info_tells_a_state_from_k_and_v(capsys):
    assert main(["info", "random:qwen3.5-0.8b"]) == 0
    output = capsys.readouterr().out
    assert "24, 18 of them with a state in place of K and V" in output
    assert (
        "20.2 MB a sequence, whatever its length; kept 2 times, 40.4 MB; with --draft once more for each drafted token"
        in output
    )
    assert main(["info", "random:qwen3.5-0.8b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state_bytes"] == read_config("random:qwen3.5-0.8b").state_bytes
    assert main(["info", "random:0.6b"]) == 0
    assert "state" not in capsys.readouterr().out


# -- The hybrid that ships ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text():
    return tq.load("tiny").tokenizer.encode(held_out_texts()["fractions.py"])


@pytest.fixture(scope="module")
def theirs():
    return AutoModelForCausalLM.from_pretrained(find_model(NAME), dtype=torch.float32, attn_implementation="eager").eval()


def test_logits_are_those_of_transformers(text, theirs):
    prompt = torch.tensor([text[:120]])
    worst = worst_error(theirs, load_model(NAME), "fp32", prompt, steps=16)
    assert worst <= 1e-4


def test_it_has_learned_python(text):
    """A model of random weights has 8.3 nats a token. What is judged is what the weights say, and not a figure of training."""
    assert float(cross_entropy(cpu_logits(load_model(NAME), text[:512]), torch.tensor(text[1:513]))) < 4.0


def test_its_own_drafts_are_often_right_and_never_change_the_text(text):
    prompts = [text[start : start + 60] for start in (0, 700, 1500)]
    texts = []
    for draft in (None, DraftSpec("mtp", 2)):
        with always_drafting():
            result = load(NAME, executor="cpu", draft=draft).generate(prompts, max_new_tokens=40, sampling=Sampling())
        texts.append([done.token_ids for done in result.completions])
    assert texts[0] == texts[1]
    assert result.drafting.accepted > 0.3 * result.drafting.proposed > 0
