"""transformers' attention implementation `tq`: decode steps over a packed `TQCache`, beside SDPA over the restored one."""

import copy

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import tq
from haarkv.tq_ops.cpu import library
from tq.hf import attention as kernels
from tq.hf.attention import IMPLEMENTATION, Stored, attention, dense

pytestmark = pytest.mark.skipif(not library.isas(), reason="the CPU kernels are not built")

VOCAB, PROMPT, NEW = 61, 150, 12
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "phi3": Phi3Config}
PROMPTS = torch.randint(2, VOCAB, (2, PROMPT), generator=torch.Generator().manual_seed(1))


def build(kind=Qwen3Config, dtype=torch.float32, **special):
    """A model whose text depends on its attention."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**{**COMMON, **special})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0, 0.7 if "embed" in name else 1.3 * parameter.shape[1] ** -0.5)
    return model.to(dtype)


@pytest.fixture
def calls(monkeypatch):
    """The layers whose attention went through kernels, in order."""
    made = []
    attend = kernels.Reader.attend

    def counted(self, q, seen, softmax_scale, padding):
        made.append((self._layer, seen))
        return attend(self, q, seen, softmax_scale, padding)

    monkeypatch.setattr(kernels.Reader, "attend", counted)
    return made


def text(model, implementation, rows=PROMPTS, mask=None, cache=None, **kwargs):
    model.set_attn_implementation(implementation)
    cache = cache or tq.TQCache(model.config, **{"kv": "tq4", **kwargs.pop("options", {})})
    out = model.generate(
        rows, attention_mask=torch.ones_like(rows) if mask is None else mask, past_key_values=cache, max_new_tokens=NEW,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True, **{"do_sample": False, **kwargs},
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


@pytest.fixture
def beside(calls):
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


@pytest.mark.parametrize("name", FAMILIES)
def test_decode_steps_read_packed_codes(name, beside, calls):
    near(build(FAMILIES[name]), beside)
    assert calls == [(layer, PROMPT + step) for step in range(1, NEW) for layer in range(2)]


@pytest.mark.parametrize(
    "options",
    [
        {"kv": "k=tq4,v=tq2"},
        {"kv": "k=bf16,v=tq4"},
        {"kv": "tq8"},
        {"plan": {1: "tq3"}, "skip_layers": [0]},
    ],
)
def test_any_format_that_the_kernels_read(options, beside, calls):
    near(build(), beside, options=options)
    assert len(calls) == 2 * (NEW - 1)


def test_wider_heads(beside, calls):
    near(build(head_dim=128), beside, options={"kv": "tq5"})


@pytest.mark.parametrize(("tail", "sink"), [(7, 0), (128, 3), (1, 1), (200, 2), (0, 5)])
def test_tail_and_sinks(tail, sink, beside, calls):
    """The tail is read where it lies in a ring; of 200 tokens, it is not full at first."""
    near(build(dtype=torch.bfloat16), beside, options={"tail": tail, "sink": sink})
    assert len(calls) == 2 * (NEW - 1)


@pytest.mark.parametrize(("options", "counts"), [({"kv": "tq4", "tail": 31}, (0, 0)), ({"kv": "tq4"}, (9, 0))], ids=str)
def test_modes_of_inference_may_change_between_steps(options, counts, calls):
    """Memory grows in one mode and is written in another."""
    model = build(dtype=torch.bfloat16)
    model.set_attn_implementation(IMPLEMENTATION)
    cache, mask = tq.TQCache(model.config, **options), padded(*counts)
    with torch.no_grad():
        model(PROMPTS, attention_mask=mask, past_key_values=cache)
    for step in range(120):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        with torch.inference_mode() if step % 3 else torch.no_grad():
            model(PROMPTS[:, :1], attention_mask=mask, past_key_values=cache)
    assert len(calls) == 2 * 120


@pytest.mark.parametrize("options", [{"kv": "kivi2"}, {"kv": "k=tq4,v=q8_0"}, {"kv": "kivi2", "sink": 4}], ids=str)
def test_what_is_here_to_compare_with_is_restored(options, calls):
    same(build(dtype=torch.bfloat16), options=options)
    assert not calls


def test_a_wrong_place_in_the_ring_would_show(monkeypatch, beside):
    """K's ring out of step with V's."""
    view = kernels.Reader._view

    def out_of_step(self):
        cache = view(self)
        k, _ = cache.kept(self._layer)
        k.vectors[:, :, k.sink :] = k.vectors[:, :, k.sink :].roll(1, 2)
        return cache

    monkeypatch.setattr(kernels.Reader, "_view", out_of_step)
    text(build(dtype=torch.bfloat16), IMPLEMENTATION, options={"tail": 128, "sink": 3})
    assert max(beside) > 10


def test_fp32_tails_stay_fp32(calls):
    """The kernels keep BF16 beside what is packed, so a tail of an FP32 model is restored."""
    same(build(), options={"tail": 8})
    assert not calls


def test_other_layers_are_restored(calls):
    model = build(MistralConfig, sliding_window=40)
    same(model)
    assert not calls
    same(build(head_dim=32, hidden_size=128))
    assert not calls


def padded(*counts, rows=PROMPTS):
    """A mask that hides so many tokens at the beginning of each row."""
    return (torch.arange(rows.shape[1]) >= torch.tensor(counts).unsqueeze(1)).long()


LONG = torch.randint(2, VOCAB, (3, 250), generator=torch.Generator().manual_seed(2))
"""Steps behind it begin a new block."""


@pytest.mark.parametrize("counts", [(9, 0), (0, 130), (128, 127), (149, 1)], ids=str)
def test_left_padding_is_left_out(counts, beside, calls):
    """A part of a block, whole blocks, and all but one token."""
    near(build(), beside, mask=padded(*counts))
    assert len(calls) == 2 * (NEW - 1)


@pytest.mark.parametrize("options", [{}, {"kv": "k=tq8,v=tq5"}], ids=str)
@pytest.mark.parametrize("counts", [(5, 128, 249), (0, 200, 131)], ids=str)
def test_left_padding_where_blocks_end(counts, options, beside, calls):
    near(build(), beside, rows=LONG, mask=padded(*counts, rows=LONG), options=options)
    assert len(calls) == 2 * (NEW - 1)


def test_left_padding_of_rows_that_beams_reorder(calls):
    model, mask = build(), padded(40, 0)
    expected, _ = text(model, "sdpa", num_beams=3, mask=mask)
    tokens, _ = text(model, IMPLEMENTATION, num_beams=3, mask=mask)
    assert torch.equal(tokens, expected)
    assert calls


@pytest.mark.parametrize("error", [-1, 1])
def test_padding_of_another_length_would_show(error, monkeypatch, beside):
    attend = kernels.Reader.attend
    monkeypatch.setattr(
        kernels.Reader, "attend", lambda self, q, seen, scale, padding: attend(self, q, seen, scale, (padding[0] + error, 0))
    )
    text(build(), IMPLEMENTATION, mask=padded(9, 0))
    assert max(beside) > 10


def test_other_masks_are_restored(calls):
    """Holes, and padding under tokens that are kept as they are, which kernels find by their positions."""
    model, holes = build(), torch.ones_like(PROMPTS)
    holes[0, 20:25] = 0
    same(model, mask=holes)
    bf16 = build(dtype=torch.bfloat16)
    same(bf16, mask=padded(9, 0), options={"sink": 4})
    assert not calls


def test_beams_and_sampling(calls):
    model = build()
    torch.manual_seed(0)
    expected, _ = text(model, "sdpa", num_beams=3)
    tokens, _ = text(model, IMPLEMENTATION, num_beams=3)
    assert torch.equal(tokens, expected)
    assert calls


def test_balanced_channels(beside):
    """What is stored is scaled by channel; queries and outputs undo it."""
    model = build()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_norm.weight[[3, 40]] *= 32
            layer.self_attn.q_norm.weight[[3, 40]] /= 32
    cache = tq.TQCache(model.config, "tq4", model=model)
    assert cache.uneven
    near(model, beside, cache=cache)


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


@pytest.mark.parametrize("kv", ["tq4", "kivi4", "k=kivi2,v=tq4"])
def test_sides_that_grow_in_other_steps_do_not_drive_each_other(kv):
    """K and V lie in as many blocks, and each has memory to spare by its own count."""
    config = build().config
    config._attn_implementation = IMPLEMENTATION
    cache = tq.TQCache(config, kv)
    for count in (1000, *[1] * 60):
        k, v = torch.randn(2, 1, 2, count, 64, dtype=torch.bfloat16)
        keys, _ = cache.update(k, v, 0)
        if isinstance(keys, Stored) and count == 1:
            keys.attend(torch.randn(1, 4, 1, 64, dtype=torch.bfloat16), 0.1, ())
    assert max(side.packed.blocks for side in cache.layers[0].sides) <= 1060 * 33 // 32 // 128 + 2


@pytest.mark.parametrize("options", [{"tail": 7}, {"tail": 128, "sink": 3}, {"kv": "kivi4", "tail": 70}], ids=str)
def test_a_tail_that_was_cropped_is_restored(options):
    """What has left it is packed, and kernels would look for it in the ring."""
    model, logits = build(dtype=torch.bfloat16), []
    for name in ("sdpa", IMPLEMENTATION):
        model.set_attn_implementation(name)
        cache = tq.TQCache(model.config, **options)
        with torch.no_grad():
            for part in (PROMPTS, PROMPTS[:, :1]):
                model(part, past_key_values=cache)
            cache.crop(-5)
            logits.append(model(PROMPTS[:, 1:2], past_key_values=cache).logits)
    assert torch.equal(*logits)


def test_other_attention_gets_numbers():
    """Whoever computes with what `update` returns sees the restored tensor."""
    model = build()
    model.set_attn_implementation(IMPLEMENTATION)
    cache, plain = tq.TQCache(model.config, "tq4"), tq.TQCache(build().config, "tq4")
    x = torch.randn(1, 2, 30, 64)
    for part in (x[:, :, :29], x[:, :, 29:]):
        keys, _ = cache.update(part, part, 0)
        expected, _ = plain.update(part, part, 0)
    assert isinstance(keys, Stored)
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
    model = build()

    class Words:
        pad_token_id = 0

        def __call__(self, line):
            return type("Encoding", (), {"input_ids": [2 + ord(c) % 50 for c in line]})

        def batch_decode(self, rows, **_):
            return [" ".join(map(str, row.tolist())) for row in rows]

    model.set_attn_implementation("sdpa")
    tq.generate(model, Words(), "some words", "tq4", max_new_tokens=3, do_sample=False)
    assert calls
    assert model.config._attn_implementation == "sdpa"
    calls.clear()
    model.set_attn_implementation("eager")
    tq.generate(model, Words(), "some words", max_new_tokens=3, do_sample=False)
    assert not calls
