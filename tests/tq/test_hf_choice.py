"""`tq.TQCache` where no format is named: the choice of the model's files, or what a model in memory shows of itself."""

import shutil

import pytest
import torch
from hf_models import COMMON, build_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import tq
from haarkv.engine.plans import SINKS, TAIL
from haarkv.models.catalog import TINY
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.planning import choice_cache

pytestmark = pytest.mark.chooses

CHOICE = KVSpec("k=tq8,v=tq3", tail=60, sink=2)


@pytest.fixture
def choice_log(monkeypatch):
    """Models for which a cache was chosen; each gets `CHOICE`, if its settings can be read."""
    names = []

    def cache_for(name):
        choice_cache.read_config(name)
        names.append(name)
        return CHOICE

    monkeypatch.setattr("tq.hf.choice.cache_for", cache_for)
    return names


@pytest.fixture
def tiny(tmp_path):
    """A folder of its own, its model and its tokenizer."""
    folder = shutil.copytree(TINY, tmp_path / "model")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)


def settings(cache):
    """Formats, tails and sinks of the first layer."""
    layer = cache.layers[0]
    return cache.stats().layers[0].kv, layer.tail, layer.sink


CHOSEN_CACHE = "k=tq8,v=tq3", (60, 60), 2
LEARNED_CACHE, EXACT_KEYS = (("k=lr4,v=tq4", (TAIL, TAIL), SINKS), ("k=bf16,v=tq4", (TAIL, TAIL), SINKS))


def test_the_default_is_the_choice_for_the_models_files(choice_log, tiny):
    model, _ = tiny
    name = model.config._name_or_path
    caches = tq.TQCache(model.config), tq.TQCache(model.config, "auto"), tq.TQCache(model.config, model=model)
    assert [settings(cache) for cache in caches] == [CHOSEN_CACHE] * 3
    assert settings(tq.TQCache(model.config, model=model)) == CHOSEN_CACHE
    assert choice_log == [name] * 3  # for the same model only once
    assert settings(tq.TQCache(model.config, "tq4")) == ("tq4", (0, 0), 0)


def test_the_cache_of_tq_generate_is_the_one_of_transformers(monkeypatch, tmp_path):
    monkeypatch.setattr(choice_cache, "home", lambda: tmp_path)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    spec = choice_cache.cache_for("tiny")
    for cache in (tq.TQCache(model.config), tq.TQCache(model.config, model=model)):
        assert [row.kv for row in cache.stats().layers] == [spec.layers[layer] for layer in range(6)]
        assert settings(cache)[1:] == ((TAIL, TAIL), SINKS)
    assert len(list(tmp_path.iterdir())) == 1


@torch.no_grad()
def test_other_weights_than_those_of_the_files_are_learned_from_themselves(choice_log, tiny):
    model, tokenizer = tiny
    model.model.layers[2].self_attn.k_proj.weight *= 1.5
    cache = tq.TQCache(model.config, model=model)
    assert settings(cache) == LEARNED_CACHE
    first = cache.layers[2].k_format
    assert tq.TQCache(model.config, model=model).layers[2].k_format == first
    model.model.layers[2].self_attn.k_proj.weight /= 3
    assert tq.TQCache(model.config, model=model).layers[2].k_format != first
    assert tq.generate(model, tokenizer, "import os\n", max_new_tokens=4)
    assert not choice_log


def test_a_model_without_files_is_learned_by_the_tokenizer_that_it_is_given(tiny):
    _, tokenizer = tiny
    sizes = {"vocab_size": 4096, "head_dim": 32, "max_position_embeddings": 2048}
    model = build_model(AutoConfig.for_model("qwen3", **{**COMMON, **sizes}))
    assert settings(tq.TQCache(model.config, model=model, tokenizer=tokenizer)) == LEARNED_CACHE


@pytest.mark.parametrize(
    ("family", "sizes", "gives_tokenizer", "reason"),
    [
        ("qwen3", {"vocab_size": 4096, "head_dim": 32}, False, "to learn its keys, give the model's tokenizer as well"),
        ("qwen3", {"head_dim": 32}, True, "its tokenizer has more tokens than the model"),
        ("llama", {"vocab_size": 4096}, True, "learned keys take a head_dim that 32 divides, and this model's is 16"),
        ("gpt2", {"vocab_size": 4096, "num_attention_heads": 2}, True, "its keys could be learned only up to 2.. positions"),
    ],
    ids=["no tokenizer", "another's tokenizer", "head_dim", "no RoPE"],
)
def test_where_keys_cannot_be_learned_they_stay_as_they_are_and_it_is_said(tiny, family, sizes, gives_tokenizer, reason):
    model = build_model(AutoConfig.for_model(family, **{**COMMON, **sizes}))
    with pytest.warns(UserWarning, match=f"^K stays in bf16, and V in tq4: .*{reason}"):
        cache = tq.TQCache(model.config, model=model, tokenizer=tiny[1] if gives_tokenizer else None)
    assert settings(cache) == EXACT_KEYS


@pytest.mark.parametrize(
    ("options", "phrase"),
    [
        ({}, "no cache can be chosen by a config alone: .*; give TQCache.config, model=model., or a format as kv"),
        ({"tail": 3}, "--kv auto, the default, sets the whole cache; leave out --kv-tail"),
        ({"kv": "auto", "skip_layers": [0]}, "--kv auto sets the whole cache; leave out --kv-skip-layers"),
        ({"plan": {0: "tq3"}}, "a plan of some layers needs the format of the others; name it with kv"),
    ],
)
def test_a_config_without_files_and_options_without_a_format_are_refused(options, phrase):
    with pytest.raises(InputError, match=f"^{phrase}"):
        tq.TQCache(AutoConfig.for_model("llama", **COMMON), **options)
