"""transformers' attention implementation `tq`: decode steps over a packed `TQCache`, beside SDPA over the restored one."""

import copy

import pytest
import torch
from hf_models import COMMON, VOCAB, build_model
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import tq
from haarkv.models.catalog import TINY
from haarkv.tq_ops.cpu import library
from tq.hf.layer import IMPLEMENTATION, PackedTensor, attention, dense
from tq.hf.store import Store

pytestmark = pytest.mark.skipif(not library.isas(), reason="the CPU kernels are not built")

PROMPT, NEW = 150, 12
PROMPTS = torch.randint(2, VOCAB, (2, PROMPT), generator=torch.Generator().manual_seed(1))


def build(family="qwen3", dtype=torch.float32, **special):
    wide = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 512}
    return build_model(AutoConfig.for_model(family, **{**COMMON, **wide, **special}), dtype)


@pytest.fixture
def calls(monkeypatch):
    """The layers whose attention went through kernels, in order."""
    steps = []
    attend = Store.attend

    def record(self, q, softmax_scale):
        steps.append((self.kv.index, self.end))
        return attend(self, q, softmax_scale)

    monkeypatch.setattr(Store, "attend", record)
    return steps


def text(model, implementation, rows=PROMPTS, mask=None, cache=None, **kwargs):
    model.set_attn_implementation(implementation)
    cache = cache or tq.TQCache(model.config, **{"kv": "tq4", **kwargs.pop("options", {})})
    out = model.generate(
        rows, attention_mask=torch.ones_like(rows) if mask is None else mask, past_key_values=cache, max_new_tokens=NEW,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True, **{"do_sample": False, **kwargs},
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


@pytest.fixture
def sdpa_distances(calls):
    """How far each call of the kernels is from SDPA over what the cache restores, as a share of what rounding may do."""
    shares = []

    def both(module, q, key, value, mask, **kwargs):
        before = len(calls)
        k, v = dense(key), dense(value)
        out, weights = attention(module, q, key, value, mask, **kwargs)
        if len(calls) > before:
            theirs, _ = sdpa_attention_forward(module, q, k, v, mask, **kwargs)
            shares.append(float((out - theirs).abs().max()) / rounding(q, k, v, kwargs["scaling"]))
        return out, weights

    AttentionInterface.register(IMPLEMENTATION, both)
    yield shares
    AttentionInterface.register(IMPLEMENTATION, attention)


def rounding(q, k, v, scaling):
    """What two orders of sums may move attention by: logits are sums of D products, and outputs of a token each.

    A softmax of logits that are off by e is off by 2 e of itself. In BF16 both round probabilities and results, to 2**-9.
    """
    unit = 2.0**-24
    logits = q.shape[-1] * unit * scaling * q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max()
    halves = 4 * 2.0**-9 if q.dtype == torch.bfloat16 else 0.0
    return float((2 * logits + k.shape[2] * unit + halves) * v.float().abs().max())


def near(model, shares, **kwargs):
    """Each step of each layer is attention over what is stored, up to the order of sums. Whole texts would show, too, which
    levels the layers behind have picked of the difference."""
    text(model, IMPLEMENTATION, **kwargs)
    assert shares
    assert max(shares) <= 1


def same(model, **kwargs):
    """The text and each logit that transformers' SDPA gives."""
    (expected, theirs), (tokens, logits) = (text(model, name, **kwargs) for name in ("sdpa", IMPLEMENTATION))
    assert torch.equal(tokens, expected)
    assert torch.equal(logits, theirs)


def padding_mask(*counts):
    """A mask that hides this many tokens at the beginning of each row."""
    return (torch.arange(PROMPT) >= torch.tensor(counts).unsqueeze(1)).long()


IN_BF16 = {"dtype": torch.bfloat16}
READ = {
    **{family: ({"family": family}, {}) for family in ("llama", "qwen2", "qwen3", "phi3")},
    **{str(options): ({}, {"options": options}) for options in (
        {"kv": "k=tq4,v=tq2"}, {"kv": "k=bf16,v=tq4"}, {"kv": "tq8"}, {"plan": {1: "tq3"}, "skip_layers": [0]})},
    "wider heads": ({"head_dim": 128}, {"options": {"kv": "tq5"}}),
    # The tail is read where it lies in a ring; of 200 tokens, it is not full at first.
    **{f"tail {tail}, sink {sink}": (IN_BF16, {"options": {"tail": tail, "sink": sink}})
       for tail, sink in ((7, 0), (128, 3), (1, 1), (200, 2), (0, 5))},
}  # fmt: skip
"""Models, and what of them the kernels read."""


@pytest.mark.parametrize("name", READ)
def test_decode_steps_read_packed_codes(name, sdpa_distances, calls):
    model, options = READ[name]
    near(build(**model), sdpa_distances, **options)
    assert [length for _, length in calls] == [PROMPT + step for step in range(1, NEW) for _ in range(2)]


def test_modes_of_inference_may_change_between_steps(calls):
    """Memory grows in one mode and is written in another."""
    model = build(dtype=torch.bfloat16)
    model.set_attn_implementation(IMPLEMENTATION)
    cache = tq.TQCache(model.config, "tq4", tail=31)
    model(PROMPTS, past_key_values=cache)  # with gradients, which nothing keeps
    assert not any(tensor.requires_grad for layer in cache.layers for tensor in layer.store.tensors())
    for step in range(120):
        with torch.inference_mode() if step % 3 else torch.no_grad():
            model(PROMPTS[:, :1], past_key_values=cache)
    assert len(calls) == 2 * 120


RESTORE_CASES = {
    # What is here to compare with.
    **{str(options): (IN_BF16, {"options": options}) for options in (
        {"kv": "kivi2"}, {"kv": "k=tq4,v=q8_0"}, {"kv": "kivi2", "sink": 4})},
    "an FP32 tail": ({}, {"options": {"tail": 8}}),  # the kernels keep BF16 beside what is packed
    "a window": ({"family": "mistral", "sliding_window": 40}, {}),
    "small heads": ({"head_dim": 32, "hidden_size": 128}, {}),
    "holes": ({}, {"mask": torch.ones_like(PROMPTS).index_fill(1, torch.arange(20, 25), 0)}),
    "padding": ({}, {"mask": padding_mask(9, 0)}),
}  # fmt: skip


@pytest.mark.parametrize("name", RESTORE_CASES)
def test_all_else_is_restored(name, calls):
    model, options = RESTORE_CASES[name]
    same(build(**model), **options)
    assert not calls


def test_rows_that_beams_reorder(calls):
    model = build()
    expected, _ = text(model, "sdpa", num_beams=3)
    tokens, _ = text(model, IMPLEMENTATION, num_beams=3)
    assert torch.equal(tokens, expected)
    assert calls


def test_balanced_channels(sdpa_distances):
    """What is stored is scaled by channel; queries and outputs undo it."""
    model = build()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_norm.weight[[3, 40]] *= 32
            layer.self_attn.q_norm.weight[[3, 40]] /= 32
    cache = tq.TQCache(model.config, "tq4", model=model)
    assert cache.uneven
    near(model, sdpa_distances, cache=cache)


def test_a_copy_and_a_cropped_cache_are_read_where_they_lie(calls):
    model = build()
    model.set_attn_implementation(IMPLEMENTATION)
    prefix = tq.TQCache(model.config, "tq4")
    with torch.no_grad():
        model(PROMPTS, past_key_values=prefix, use_cache=True)
        token = PROMPTS[:, :1]
        expected = model(token, past_key_values=prefix, use_cache=True).logits
        other = copy.deepcopy(prefix)
        for _ in range(5):
            model(token + 1, past_key_values=prefix, use_cache=True)
        prefix.crop(-6)
        other.crop(-1)
        for cache in (prefix, other):
            assert torch.equal(model(token, past_key_values=cache, use_cache=True).logits, expected)
    assert len(calls) == 2 * 8


@pytest.mark.parametrize("options", [{"tail": 7}, {"tail": 128, "sink": 3}, {"tail": 2, "sink": 9}], ids=str)
def test_a_tail_that_was_cropped_is_read_where_it_lies(options, sdpa_distances):
    """What comes back into it is restored into the ring, where kernels look for it."""
    model = build(dtype=torch.bfloat16)
    model.set_attn_implementation(IMPLEMENTATION)
    cache = tq.TQCache(model.config, "tq4", **options)
    with torch.no_grad():
        for part in (PROMPTS, PROMPTS[:, :1]):
            model(part, past_key_values=cache)
        cache.crop(-5)
        model(PROMPTS[:, 1:2], past_key_values=cache)
    assert len(sdpa_distances) == 2 * 2
    assert max(sdpa_distances) <= 1


def test_other_attention_gets_numbers():
    """Code that computes with what `update` returns sees the dequantized tensor."""
    model = build()
    model.set_attn_implementation(IMPLEMENTATION)
    cache, plain = tq.TQCache(model.config, "tq4"), tq.TQCache(build().config, "tq4")
    x = torch.randn(1, 2, 30, 64)
    for part in (x[:, :, :29], x[:, :, 29:]):
        keys, _ = cache.update(part, part, 0)
        expected, _ = plain.update(part, part, 0)
    assert isinstance(keys, PackedTensor)
    assert (keys.shape, keys.dtype) == (expected.shape, expected.dtype)
    # Restored at once or in two parts: sums of 64 products in another order.
    torch.testing.assert_close(
        torch.repeat_interleave(keys, 2, 1),
        torch.repeat_interleave(expected, 2, 1),
        rtol=0,
        atol=64 * 2.0**-24 * float(expected.norm(dim=-1).max()),
    )
    assert torch.equal(keys @ x.mT, dense(keys) @ x.mT)
    assert type(keys + 0) is torch.Tensor


def test_generate_switches_for_its_own_call(calls):
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    for implementation in ("sdpa", "eager"):
        calls.clear()
        model.set_attn_implementation(implementation)
        tq.generate(model, AutoTokenizer.from_pretrained(TINY), "some words", "tq4", max_new_tokens=3, do_sample=False)
        assert bool(calls) == (implementation == "sdpa")
        assert model.config._attn_implementation == implementation
