"""A config.json that was edited: what was stored before is refused in one line, or goes on as a fresh run would."""

import json
import os
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers_judge import saved_random

import tq
from haarkv.engine.plans import plan_for, shape_signature
from haarkv.models.catalog import read_config
from haarkv.models.families import FAMILIES
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import cache_file
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.planning import choice_cache

SHAPE = {
    "vocab_size": 257, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "eos_token_id": 256,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MODELS = {
    "qwen3": ("Qwen3", {}),
    "windows": ("Gemma3Text", {
        "sliding_window": 16, "query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"]}),
    "experts": ("Qwen3Moe", EXPERTS),
    "hybrid": ("Qwen3_5Text", DELTA),
}  # fmt: skip
PROMPT = [(7 * token) % 250 for token in range(60)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def open_session(folder, **more):
    return tq.load(folder, kv="tq4", executor="reference", allow_collapse=True, on_warning=lambda _: None, **more)


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """By name: a folder, its config.json, and a file of what it stores of a prompt."""

    @cache
    def get(name):
        folder = tmp_path_factory.mktemp(name)
        saved_random(folder, MODELS[name][0], SHAPE | MODELS[name][1])
        config = json.loads((folder / "config.json").read_text())
        if name == "qwen3":  # as transformers 4 wrote it
            config = config | {"rope_theta": config.pop("rope_parameters")["rope_theta"]}
            (folder / "config.json").write_text(json.dumps(config))
        session, file = open_session(folder), folder / "it.cache"
        session.save_cache(file, session.generate([PROMPT], max_new_tokens=1, keep=True).stored[0])
        return folder, config, file

    return get


def with_config(folder, target, config):
    """The same weights and tokenizer beside another config.json."""
    target.mkdir(exist_ok=True)
    for file in ("model.safetensors", "tokenizer.json"):
        if not (target / file).exists():
            (target / file).symlink_to(folder / file)
    (target / "config.json").write_text(json.dumps(config))
    return target


def others(value, key):
    """Values that an entry may have instead."""
    if key == "model_type":
        return [kind for kind in FAMILIES if kind != value]
    match value:
        case bool():
            return [not value]
        case int() | float():
            return [value * 2, value / 2 if isinstance(value, float) else max(1, value // 2)]
        case None:
            return [True, 2, 64]
        case list():
            return [value[::-1], value[:1] * len(value)]
        case str():
            return ["gelu_pytorch_tanh", "silu", "linear", "full_attention"]
    return []


def edits(config):
    """Each entry changed alone, in words, and the whole config."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{words}", config | {key: inner}) for words, inner in edits(value))
        else:
            yield from ((f"{key}={json.dumps(other)}", config | {key: other}) for other in others(value, key))


def with_further(config):
    """What no entry of these configs says, but may be added."""
    for place in ("rope_parameters", "rope_scaling"):
        for scaling in (YARN, {"rope_type": "linear", "factor": 2.0}):
            yield f"{place}={scaling}", config | {place: config.get(place, {}) | scaling}
    more = {"rope_theta": 3e4, "sliding_window": 8, "use_sliding_window": True, "partial_rotary_factor": 0.5}
    for key, value in more.items():
        yield f"{key}={value}", config | {key: value}


@pytest.mark.parametrize("name", MODELS)
def test_each_entry_of_the_config_changed_alone_is_refused_or_changes_nothing(saved_model, tmp_path, name):
    """Whatever entries the config has; K and V that are reused are those of a fresh run, bit for bit."""
    folder, config, file = saved_model(name)
    before, outcomes = read_config(folder), {}
    for entry, edit in (*edits(config), *with_further(config)):
        other = with_config(folder, tmp_path / "m", edit)
        try:
            if read_config(other) == before:
                outcomes[entry] = "the same model"
                continue
            session = open_session(other)
        except InputError:
            outcomes[entry] = "no model"
            continue
        try:
            sequence = session.load_cache(file)
        except InputError as error:
            outcomes[entry] = str(error)
            continue
        fresh, went_on = (
            session.generate([PROMPT], max_new_tokens=4, stored=prefix, keep=True) for prefix in (None, sequence)
        )
        assert went_on.completions[0].token_ids == fresh.completions[0].token_ids, entry
        torch.testing.assert_close(went_on.stored[0].tensors, fresh.stored[0].tensors, rtol=0, atol=0, msg=entry)
        outcomes[entry] = "taken"
    refusals = {entry: words for entry, words in outcomes.items() if "prefill again" in words}
    assert not any("\n" in words for words in refusals.values())
    assert "rms_norm_eps=2e-06" in refusals
    assert any("rope.theta" in words for words in refusals.values())
    assert outcomes["max_position_embeddings=1024"] == "taken"


def test_a_remembered_choice_is_that_of_its_declaration(saved_model, tmp_path):
    """Even where an edit leaves the file's size and time as they were."""
    folder, config, _ = saved_model("qwen3")
    other = with_config(folder, tmp_path / "m", config)
    before, times = choice_cache.file_for(str(other), 0.1), (other / "config.json").stat()
    with_config(folder, other, config | {"rms_norm_eps": 2e-06})
    os.utime(other / "config.json", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (other / "config.json").stat().st_size == times.st_size
    assert choice_cache.file_for(str(other), 0.1) != before


def test_what_changes_no_number_changes_no_declaration(saved_model):
    """Drafts, on or off; more versions of a state; tokens that end a text."""
    for name in MODELS:
        config = read_config(saved_model(name)[0])
        for other in (config.for_drafts(5), replace(config, eos_token_ids=(1,), max_position_embeddings=8192)):
            assert shape_signature(other) == shape_signature(config)
    hybrid, file = open_session(saved_model("hybrid")[0]), saved_model("hybrid")[2]
    drafting = replace(hybrid, config=hybrid.config.for_drafts(3))
    torch.testing.assert_close(drafting.load_cache(file).tensors, hybrid.load_cache(file).tensors, rtol=0, atol=0)
    assert plan_for(KVSpec("tq4", made_for=shape_signature(drafting.config)), hybrid.config)


def test_another_dtype_goes_on_and_the_file_names_the_first(saved_model):
    folder, _, file = saved_model("qwen3")
    assert cache_file.read_origin(file)[1].made_by == "reference float32"
    other = open_session(folder, dtype="bfloat16")
    result = other.generate([], stored=other.load_cache(file), max_new_tokens=1)
    assert result.completions[0].reused_tokens == len(PROMPT)
