"""Models with planted faults, by commands and as caches of transformers: balanced and said in a line, or refused."""

import json
import warnings

import pytest
import torch
from planted import key_biases, outlier_channels, save_tiny, text
from refusals import assert_refused
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GPT2Config, GPT2LMHeadModel

import tq
from haarkv.models.catalog import TINY
from haarkv.tq_ops.errors import InputError
from tq.hf.config import layer_moments


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(outlier_channels(100), tmp_path_factory.mktemp("planted") / "m")


GENERATE = ("--prompt", "def main(argv):\n    return len(argv) + sum(map(len, argv))\n", "--max-new-tokens", 4)


def test_balance_is_silent_and_can_be_left_out(run, folder):
    generate = ("generate", "--model", folder, *GENERATE)
    balanced = run(*generate)
    assert "warning" not in balanced.err
    assert run("generate", "--model", "tiny", *GENERATE).out == balanced.out
    result = run(*generate, "--balance", "off")
    assert_refused(result, "text would be garbage: K of layers 0 to 5", "leave balance on", "--allow-collapse")
    allowed = run(*generate, "--balance", "off", "--allow-collapse")
    allowed.notes("tq: warning: K of layers 0 to 5 suffers in tq4")


def test_a_file_goes_on_with_the_balance_that_it_was_stored_with(run, folder, tmp_path):
    generate = ("generate", "--model", folder, "--max-new-tokens", 1, "--prompt")
    off = ("--balance", "off", "--allow-collapse")
    for name, options in (("balanced", ()), ("off", off), ("exact", ("--kv", "bf16"))):
        assert run(*generate, GENERATE[1], "--save-cache", tmp_path / name, *options).code == 0
    more = (*generate, GENERATE[1] + "#", "--json")
    for name, options, words in (
        ("balanced", (), None), ("off", off, None), ("balanced", off, "leave out --balance off"),
        ("off", (), "give --balance off"),
        ("exact", ("--kv", "tq4"), "stores layer 0 in bf16, and this run in tq4"),
    ):  # fmt: skip
        code, out, err = run(*more, *options, "--load-cache", tmp_path / name)
        assert (code, words is None or words in err.splitlines()[-1]) == (2 if words else 0, True), err
        assert words or json.loads(out)["reused_tokens"] > 10


# -- TQCache --------------------------------------------------------------------------------------------------------------

UNEVEN_MODELS = {
    "outliers": lambda: outlier_channels(30),
    "biases": lambda: key_biases(800, (1, 4)),
}


@pytest.fixture(scope="module")
def even():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


@pytest.fixture(scope="module")
def ids():
    return AutoTokenizer.from_pretrained(TINY)(text()[:700], return_tensors="pt").input_ids[:, :160]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("planted")
    return {
        name: AutoModelForCausalLM.from_pretrained(save_tiny(make(), root / name), dtype=torch.float32)
        for name, make in UNEVEN_MODELS.items()
    }


@torch.inference_mode()
def logits(model, ids, cache):
    return model(ids, past_key_values=cache).logits[0].log_softmax(-1)


def kl(model, ids, cache):
    exact = logits(model, ids, DynamicCache(config=model.config))
    return float((exact.exp() * (exact - logits(model, ids, cache))).sum(-1).mean())


def test_of_an_even_model_nothing_is_said_and_nothing_changes(even, ids):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = tq.TQCache(even.config, "tq4", model=even)
        assert cache.uneven == ()
        assert torch.equal(logits(even, ids, cache), logits(even, ids, tq.TQCache(even.config, "tq4")))


def test_outliers_are_balanced_and_nothing_is_said(models, even, ids):
    model = models["outliers"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = tq.TQCache(model.config, "tq4", model=model)
        balanced_kl = kl(model, ids, cache)
    assert len(cache.uneven) == 12
    assert balanced_kl < 1.5 * kl(even, ids, tq.TQCache(even.config, "tq4"))
    with pytest.warns(UserWarning, match="suffers in tq4"):
        assert kl(model, ids, tq.TQCache(model.config, "tq4", model=model, balance=False)) > 10 * balanced_kl


def test_generate_hands_the_model_over_and_biases_are_refused_by_the_weights_unless_allowed(models):
    model, tokenizer = models["biases"], AutoTokenizer.from_pretrained(TINY)
    with pytest.raises(InputError, match="garbage: K of layers 1 and 4 suffers in tq4"):
        tq.generate(model, tokenizer, "def", "tq4", balance=False, max_new_tokens=1)
    with pytest.warns(UserWarning, match="K of layers 1 and 4"):
        tq.TQCache(model.config, "tq4", model=model, balance=False, allow_collapse=True)
    tq.TQCache(model.config, "tq4", model=model, balance=False, plan={1: "k=bf16,v=tq4", 4: "k=bf16,v=tq4"})
    assert isinstance(tq.generate(model, tokenizer, "def", max_new_tokens=1), str)


def test_weights_of_other_names_are_left_as_they_are():
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=61)
    model = GPT2LMHeadModel(config)
    assert layer_moments(model, config) == {}
    assert tq.TQCache(config, "tq4", model=model).uneven == ()
