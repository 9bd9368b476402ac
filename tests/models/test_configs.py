"""`config.json`: what it says is what transformers reads, what it leaves out what transformers fills in, and else a line."""

import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import bounds
import pytest
import torch
import transformers
from at_length import rest
from checkpoints import CONFIG, write_checkpoint
from family_models import HYBRIDS, MODELS, saved
from transformers_judge import worst_error

from haarkv.models.catalog import load_model
from haarkv.models.catalog import read_config as of_folder
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.shapes import KVShape

__all__ = ["saved"]


def read_config(tmp_path, content):
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return of_folder(tmp_path)


def shapes(*sizes):
    return tuple(KVShape(2, 32, window) for window in sizes)


@pytest.mark.parametrize(
    ("entries", "field", "value"),
    [
        ({"rope_theta": 5e5}, "common.attention.rope.theta", 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e6}}, "common.attention.rope.theta", 2e6),
        ({"rope_scaling": None}, "common.attention.rope.theta", 1e4),
        ({"num_key_value_heads": None}, "heads.num_kv_heads", 4),
        ({"eos_token_id": [7, 9]}, "eos_token_ids", (7, 9)),
        ({"eos_token_id": None}, "eos_token_ids", ()),
        ({"eos_token_id": 7, "text_config": CONFIG | {"eos_token_id": [9, 7]}}, "eos_token_ids", (9, 7)),
        ({"eos_token_id": [7, 8], "text_config": CONFIG | {"eos_token_id": None}}, "eos_token_ids", (7, 8)),
        ({"sliding_window": 4096, "use_sliding_window": False}, "num_layers", 2),
        ({"layer_types": ["full_attention"] * 2}, "num_layers", 2),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, "kv_shapes", shapes(None, 64)),
        (
            {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            "kv_shapes",
            shapes(64, None),
        ),
    ],
)
def test_both_generations_of_config_are_read(tmp_path, entries, field, value):
    assert attrgetter(field)(read_config(tmp_path, CONFIG | entries)) == value


@pytest.mark.parametrize(
    ("name", "entries", "word"),
    [
        ("", {"model_type": "gpt2"}, "gpt2 model; this project runs model_type qwen3, qwen3_moe, llama, mistral, qwen2"),
        ("", {"model_type": None}, "nameless"),
        ("", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ("", {"rope_scaling": {"type": "linear"}}, "factor"),
        ("", {"rope_parameters": {"rope_type": "llama3"}}, "low_freq_factor"),
        ("", {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
         "high_freq_factor"),
        ("", {"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": "warm"}}, "attention_factor"),
        ("", {"rope_scaling": {"rope_type": ["yarn"], "factor": 4}}, r"rope_type \['yarn'\] is not a string"),
        ("", {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4}}, "rope_theta 1 must be above 1"),
        ("", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("", {"rope_parameters": "default"}, "rope_parameters"),
        ("", {"rope_theta": "large"}, "rope_theta"),
        ("", {"sliding_window": 0, "use_sliding_window": True, "max_window_layers": 0}, "sliding_window 0 is no number"),
        ("", {"layer_types": ["full_attention"]}, "layer_types does not name the kind of each of 2 layers"),
        ("", {"attention_bias": True}, "biases"),
        ("", {"hidden_act": "gelu"}, "gelu"),
        ("", {"hidden_size": None}, "hidden_size"),
        ("", {"vocab_size": 0}, "vocab_size"),
        ("", {"num_hidden_layers": "2"}, "num_hidden_layers"),
        ("", {"num_key_value_heads": 3}, "3 KV heads"),
        ("", {"head_dim": 33}, "33"),
        ("", {"eos_token_id": "end"}, "eos_token_id"),
        ("", {"eos_token_id": True}, "eos_token_id True"),
        ("", {"eos_token_id": ["x"] * 10_000}, r"eos_token_id \['x', 'x', .*\.\.\.\] is"),
        ("", {"num_hidden_layers": 10**8}, "num_hidden_layers is larger than any model's; at most 1,024"),
        ("", {"vocab_size": 10**400}, "vocab_size is larger"),
        ("", {"rope_theta": 10**400}, "rope_theta"),
        ("", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ("", {"rms_norm_eps": 1e-320}, "rms_norm_eps"),
        ("", {"rope_scaling": {"type": "yarn", "factor": 1e30}}, "reaches more than 16,777,216 positions"),
        ("", {"rope_scaling": [4]}, "rope_scaling is not an object"),
        ("", {"tie_word_embeddings": "false"}, "tie_word_embeddings is neither true nor false"),
        ("", {"model_type": "qwen3_moe", "num_hidden_layers": 1024, "num_experts": 1024, "moe_intermediate_size": 8},
         "1024 layers of 1024 experts"),
        ("", {"model_type": "\ud800"}, "half a character"),
        ("llama3", {"mlp_bias": True}, "MLP biases"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "dense layers"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 of 8 experts"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": "wide", "max_window_layers": 0, "layer_types": None},
         "sliding_window 'wide' is no number of tokens"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "type 'linear_attention'"),
        ("qwen2", {"layer_types": ["full_attention", None, "full_attention"]}, "type None"),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": "6"}, "sliding_window_pattern is missing"),
        ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}}, "rope scaling 'dynamic'"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "capped logits"),
        ("gemma3", {"use_bidirectional_attention": True}, "attention to later tokens"),
        ("gemma3", {"hidden_activation": "relu"}, "activation 'relu'"),
        ("qwen3_5", {"attn_output_gate": False}, "attention without output gates"),
        ("qwen3_5", {"layer_types": ["sliding_attention"] * 4}, "type 'sliding_attention'"),
        ("qwen3_5", {"linear_num_value_heads": 5}, "5 heads of V cannot share 2 heads of K"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "a convolution of a single token"),
        ("qwen3_5", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2}}, "no part"),
        ("qwen3_5", {"head_dim": 4}, "1 coordinates of a head"),
        ("qwen3_next", {"decoder_sparse_step": 2}, "dense layers"),
    ],
    ids=lambda value: "_".join(f"{k}={v}" for k, v in value.items()).replace(" ", "")[:60] if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_config_that_cannot_be_built_is_refused_with_the_reason_and_the_file(saved, tmp_path, name, entries, word):
    raw = json.loads((saved(name)[0] / "config.json").read_text()) if name else CONFIG
    with pytest.raises(InputError, match=word) as refusal:
        read_config(tmp_path, raw | entries)
    assert "config.json" in str(refusal.value)
    assert "\n" not in str(refusal.value)


# Such as people bring. A fifth is among the ordinary tests, the rest runs with `make fuzz`.
PUBLIC = json.loads((Path(__file__).parent / "public_inputs.json").read_text(encoding="ascii"))["configs"]
PROMPT = torch.tensor([list(b"for spam in eggs: print(spam)")])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("public") / "m")


@pytest.mark.parametrize(
    "edit", rest(pytest.mark.fuzz, PUBLIC, lambda index, _: index % 5 == 0), ids=lambda edit: json.dumps(edit)[:70]
)
def test_a_public_config_means_what_it_means_to_transformers_or_is_refused(whole, tmp_path, edit):
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(whole / name)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | edit))
    refusal = ""
    try:
        model = load_model(tmp_path)
    except InputError as error:
        refusal = str(error)
    assert "\n" not in refusal
    if refusal:
        return
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    except Exception:  # it refuses such an entry, each in its own way: to us it says nothing
        theirs = transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32, attn_implementation="eager")
    assert worst_error(theirs.eval(), model, "fp32", PROMPT, steps=4) <= bounds.TRANSFORMERS_LOGITS


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '"qwen3"', "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, content):
    with pytest.raises(InputError, match=r"config\.json"):
        read_config(tmp_path, content)


def windows(config):
    return [layer.attention.window for layer in config.layers]


def test_of_a_gemma_each_fourth_layer_may_see_all_as_transformers_has_it(tmp_path):
    raw = {"model_type": "gemma3_text", "num_hidden_layers": 26, "sliding_window_pattern": 4, "sliding_window": 512}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = transformers.Gemma3TextConfig.from_pretrained(tmp_path)
    assert len(set(theirs.layer_types)) == 2
    assert windows(of_folder(tmp_path)) == [512 if kind == "sliding_attention" else None for kind in theirs.layer_types]


@pytest.mark.parametrize("family", sorted({family for family, _ in (MODELS | HYBRIDS).values()}))
def test_what_a_config_leaves_out_is_what_transformers_fills_in(tmp_path, family):
    """Each entry is left out alone, then all of them: what is declared equals that of transformers' own, whole config.

    But the end of text: no file names the token that transformers fills in, and in most vocabularies it is a word.
    """
    kind = getattr(transformers, f"{family}Config")
    whole = kind(**{"hidden_size": 128, "num_attention_heads": 32, "num_key_value_heads": 4}).to_dict()

    def read_declaration(entries):
        return replace(read_config(tmp_path, entries | {"model_type": kind.model_type}), eos_token_ids=())

    for left_out in (*({name} for name in whole), set(whole)):
        # Some entries follow from others: a kind for each layer.
        entries = {name: value for name, value in whole.items() if name not in left_out | {"layer_types"}}
        assert read_declaration(entries) == read_declaration(kind(**entries).to_dict()), left_out


@pytest.mark.parametrize(
    ("name", "entries", "positions"),
    [
        ("mistral", {"max_position_embeddings": 32768}, 32768),
        ("mistral", {"max_position_embeddings": 32768, "rope_parameters": None, "rope_scaling": {
            "type": "yarn", "factor": 4.0}}, 131072),
        ("mistral", {"max_position_embeddings": None}, 131072),
        ("qwen2", {"max_position_embeddings": None, "use_sliding_window": True}, 32768),
    ],
    ids=["stated", "yarn", "mistral_default", "qwen2_default"],
)  # fmt: skip
def test_a_window_as_wide_as_the_context_hides_nothing(saved, tmp_path, name, entries, positions):
    """The window is compared with the positions that the model may be run with: YaRN's, or the family's own default."""
    new_config = json.loads((saved(name)[0] / "config.json").read_text()) | entries
    raw = {key: value for key, value in new_config.items() if value is not None}
    raw |= {"max_window_layers": 0, "layer_types": None}
    assert windows(read_config(tmp_path, raw | {"sliding_window": positions - 1})) == [positions - 1] * 3
    config = read_config(tmp_path, raw | {"sliding_window": positions})
    assert windows(config) == [None] * 3
    assert config.max_position_embeddings == positions
