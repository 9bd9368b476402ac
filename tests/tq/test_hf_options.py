"""`tq.TQCache`: its options, plan files and refusals, and `tq.generate`."""

from dataclasses import replace

import pytest
import torch
import transformers
from family_models import MODELS
from gguf_files import SHAPE
from hf_models import COMMON, VOCAB, build_model, tq_layer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, Qwen3Config

import tq
from haarkv.engine.plans import shape_signature
from haarkv.models import hf_config
from haarkv.models.catalog import TINY
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import plan_file
from haarkv.tq_ops.kv.plan import KVSpec
from tq.hf.config import head_dims, model_shape

LLAMA, QWEN3 = LlamaConfig(**COMMON), Qwen3Config(**COMMON, head_dim=32)
IDS = torch.randint(2, VOCAB, (1, 14), generator=torch.Generator().manual_seed(1))


# --- options ---


def test_tail_and_sink_stay_as_they_came():
    """Beside a tail, so do all new tokens of a forward, whose queries have a tail each."""
    x = torch.randn(2, 3, 30, 16)
    layer = tq_layer(formats.get("tq4"), sink=4, tail=(6, 6))
    seen, exact = 0, []
    for count in (3, 20, 6, 1):
        part = x[:, :, seen : seen + count]
        seen += count
        keys, values = layer.update(part, part)
        assert torch.equal(keys, values)
        exact.append((keys == x[:, :, :seen]).all(-1).all(0).all(0).tolist())
    assert exact[0] + exact[1] == [True] * (3 + 23)
    assert exact[2] == [True] * 4 + [False] * 13 + [True] * 12
    assert exact[3] == [True] * 4 + [False] * 20 + [True] * 6
    layer.crop(-2)
    keys, _ = layer.update(x[:, :, :1], x[:, :, :1])
    same = (keys[:, :, :28] == x[:, :, :28]).all(-1).all(0).all(0)
    # The ring has room for one token beside the tail: of two that come back into it, one is restored.
    assert same.tolist() == [True] * 4 + [False] * 19 + [True] * 5


def test_layers_may_differ():
    config = Qwen3Config(**{**COMMON, "num_hidden_layers": 5, "head_dim": 64})
    cache = tq.TQCache(config, "tq4", skip_layers=[0, -1], plan={2: "k=bf16,v=tq2", -2: "kivi2"})
    assert [row.kv for row in cache.stats().layers] == ["bf16", "tq4", "k=bf16,v=tq2", "kivi2", "bf16"]
    assert [layer.tail for layer in cache.layers] == [(0, 0), (0, 0), (0, 0), (31, 0), (0, 0)]


def test_autocast_does_not_reach_the_format():
    x = torch.randn(1, 2, 40, 128)
    plain, cast = tq_layer(formats.get("tq4")), tq_layer(formats.get("tq4"))
    expected = plain.update(x, x)
    with torch.autocast("cpu", torch.bfloat16):
        actual = cast.update(x, x)
    assert torch.equal(actual[0], expected[0])
    codes = [layer.store.kv.k.fields["codes"][:, :, :40] for layer in (plain, cast)]
    assert torch.equal(*codes)


def test_k_and_v_may_have_different_head_dims():
    config = transformers.DeepseekV3Config(
        num_hidden_layers=1, num_attention_heads=2, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, hidden_size=64
    )
    assert head_dims(config.get_text_config(), 0) == (24, 16)
    cache = tq.TQCache(config, "tq4")
    keys, values = cache.update(torch.randn(1, 2, 5, 24), torch.randn(1, 2, 5, 16), 0)
    assert (keys.shape[-1], values.shape[-1]) == (24, 16)
    assert cache.stats().used == 2 * 5 * (12 + 2 + 8 + 2)


# --- refusals ---


@pytest.mark.parametrize(
    ("config", "kwargs", "words"),
    [
        (LLAMA, {"kv": "tq4", "plan": {1: "k=bf16,v=q8_0"}}, ["q8_0", "head_dim 16"]),
        (QWEN3, {"kv": "kivi2", "tail": 30}, ["kivi2", "tail=31"]),
        (LLAMA, {"kv": "tq4", "skip_layers": [2]}, ["no layer 2"]),
        (LLAMA, {"kv": "tq4", "skip_layers": [0], "plan": {-2: "tq2"}}, ["layer 0", "twice"]),
        (transformers.MambaConfig(num_hidden_layers=2), {}, ["mamba", "layer 0"]),
        (transformers.JambaConfig(num_hidden_layers=8), {}, ["jamba", "layer 0"]),
        (transformers.T5Config(), {}, ["t5", "encoder-decoder"]),
        (GPT2Config(add_cross_attention=True), {}, ["gpt2", "encoder-decoder"]),
        ({"hidden_size": 64}, {}, ["model.config", "dict"]),
    ],
)
def test_what_cannot_be_held_is_refused_in_one_line(config, kwargs, words):
    with pytest.raises(InputError) as refusal:
        tq.TQCache(config, **kwargs)
    assert "\n" not in str(refusal.value)
    for word in words:
        assert word in str(refusal.value)


def test_a_head_dim_that_only_the_model_knows_is_refused_at_the_first_token():
    with pytest.raises(InputError, match=r"q8_0 .* head_dim 24"):
        tq_layer(formats.get("q8_0")).update(torch.randn(1, 1, 2, 24), torch.randn(1, 1, 2, 24))


def test_another_batch_is_refused():
    layer = tq_layer(formats.get("tq4"))
    layer.update(torch.randn(2, 2, 3, 16), torch.randn(2, 2, 3, 16))
    with pytest.raises(InputError, match=r"holds 2 rows of 2 KV heads of 16"):
        layer.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))


def test_a_window_cannot_go_back_unless_told_before():
    layer = tq_layer(formats.get("tq4"), window=5)
    x = torch.randn(1, 2, 9, 16)
    layer.update(x, x)
    layer.crop(0)
    with pytest.raises(InputError, match="activate_past_recording"):
        layer.crop(-1)
    with pytest.raises(InputError, match="negative"):
        layer.crop(3)
    assert layer.get_seq_length() == 9


@pytest.mark.parametrize(("kv", "tail"), [("tq4", 2), ("kivi2", 31)])
def test_a_vector_that_is_not_finite_is_located_and_nothing_is_stored(kv, tail):
    layer = tq_layer(formats.get(kv, "k"), formats.get("tq4"), sink=1, tail=(tail, 2))
    x = torch.randn(2, 3, 40, 16)
    layer.update(x[:, :, :30], x[:, :, :30])
    used_bytes = layer.store.used_bytes
    good, bad = x[:, :, 30:], x[:, :, 30:].clone()
    bad[1, 2, 1, 5] = torch.inf
    for k, v, side, name in ((bad, good, "K", kv), (good, bad, "V", "tq4")):
        with pytest.raises(InputError) as refusal:
            layer.update(k, v)
        place = f"layer 1: {side} of row 1, KV head 2, position 31"
        assert str(refusal.value) == f"{place} is not finite or too large for {name}"
        assert layer.store.used_bytes == used_bytes
        assert layer.get_seq_length() == 30


# --- generate ---


@pytest.fixture(scope="module")
def tiny():
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(TINY)


def test_generate_continues_text(tiny):
    model, tokenizer = tiny
    text = tq.generate(model, tokenizer, "def main(", kv="fp32", max_new_tokens=8, do_sample=False)
    inputs = tokenizer("def main(", return_tensors="pt")
    ids = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=8, do_sample=False)
    assert text == tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def test_generate_takes_several_prompts(tiny):
    model, tokenizer = tiny
    prompts = ["import os\n\n\ndef main(", "class"]
    options = {"kv": "tq4", "max_new_tokens": 6, "do_sample": False}
    texts = tq.generate(model, tokenizer, prompts, **options)
    assert texts == [tq.generate(model, tokenizer, prompt, **options) for prompt in prompts]
    four = tq.generate(model, tokenizer, prompts, "tq4", max_new_tokens=3, num_beams=2, num_return_sequences=2)
    assert len(four) == 4


@pytest.mark.parametrize(
    ("prompt", "kwargs", "word"),
    [
        ([], {}, "no prompt"),
        ("", {}, "no tokens"),
        ("a", {"past_key_values": None}, "past_key_values"),
        ("a", {"kv": "x"}, "x"),
    ],
)
def test_generate_refuses(tiny, prompt, kwargs, word):
    with pytest.raises(InputError, match=word):
        tq.generate(*tiny, prompt, **kwargs)


# -- A plan file ------------------------------------------------------------------------------------------------------------
def write_plan(path, spec, **changes):
    plan_file.save(path, spec.plan(2), replace(model_shape(QWEN3), **changes))
    return path


@pytest.mark.parametrize("as_text", [False, True])
def test_a_plan_file_says_all(tmp_path, as_text):
    spec = KVSpec("k=tq8,v=tq2", tail=3, sink=1, layers={1: "k=bf16,v=tq4"})
    path = write_plan(tmp_path / "plan.json", spec)
    model, kv = build_model(QWEN3), "k=tq8,v=tq2"
    cache = tq.TQCache(QWEN3, plan=str(path) if as_text else path)
    assert [(layer.k_format.name, layer.v_format.name) for layer in cache.layers] == [("tq8", "tq2"), ("bf16", "tq4")]
    caches = cache, tq.TQCache(QWEN3, kv, tail=3, sink=1, plan={1: "k=bf16,v=tq4"}), tq.TQCache(QWEN3, kv)
    with torch.no_grad():
        ours, same, other = (model(IDS, past_key_values=each).logits for each in caches)
    assert torch.equal(ours, same)
    assert not torch.equal(ours, other)


@pytest.mark.parametrize("name", ["gemma3", "mistral", "mistral_window", "qwen2_window", "qwen3_yarn"])
def test_a_plan_file_of_tq_plan_fits_the_model_that_transformers_has(tmp_path, name):
    family, special = MODELS[name]
    theirs = getattr(transformers, f"{family}Config")(**{**SHAPE, **special})
    ours = hf_config.parse_config(tmp_path, theirs.to_dict())
    path, plan = tmp_path / "plan.json", KVSpec("tq3").plan(ours.num_layers)
    plan_file.save(path, plan, shape_signature(ours))
    assert {layer.k_format.name for layer in tq.TQCache(theirs, plan=path).layers} == {"tq3"}


@pytest.mark.parametrize("also", [{"kv": "tq2"}, {"tail": 3}, {"sink": 1}, {"skip_layers": [0]}])
def test_a_plan_file_and_what_it_says_already_is_refused(tmp_path, also):
    path = write_plan(tmp_path / "plan.json", KVSpec("tq4"))
    with pytest.raises(InputError, match="leave out kv, tail, sink, skip_layers and calibration"):
        tq.TQCache(QWEN3, plan=path, **also)
    with pytest.raises(InputError, match="made for another model"):
        tq.TQCache(QWEN3, plan=write_plan(tmp_path / "other.json", KVSpec("tq4"), hidden_size=80))
