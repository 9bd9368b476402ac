"""`tq.calibrate` on models of transformers: its moments are those of the attention that ran, and caches take its file."""

import pytest
import torch
from safetensors import safe_open
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, Qwen2Config, Qwen2ForCausalLM

import tq
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import calibration_file
from haarkv.validation.planning.calibrate import load_subject

COMMON = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "bos_token_id": 1}
SMALL = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**COMMON, intermediate_size=96, num_key_value_heads=1)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**COMMON, intermediate_size=96)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=64, n_layer=2, n_head=2, bos_token_id=1)),
}


@torch.no_grad()
def uneven(family, seed=0):
    """A small model whose Q, K and V have channels of very different size, as trained ones do and fresh ones do not."""
    torch.manual_seed(seed)
    model = SMALL[family]().eval()
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "query_key_value")):
            module.weight *= torch.exp(1.5 * torch.randn(len(module.weight), 1)) * 8
        elif name.endswith("c_attn"):
            module.weight *= torch.exp(1.5 * torch.randn(module.weight.shape[1])) * 8
    return model


def windows(count, length, seed=0):
    return torch.randint(0, 61, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", SMALL)
def test_learned_keys_are_nearer_than_tq4_of_the_same_bytes(family):
    model = uneven(family)
    before = model.config._attn_implementation
    steps = []
    file = tq.calibrate(model, windows(6, 80), held_back=windows(2, 80, 1), on_window=lambda *step: steps.append(step))
    assert model.config._attn_implementation == before
    assert steps[-1] == (8, 8)
    assert len(file.learned["fit"]) == 2
    unseen = torch.tensor(windows(4, 60, 2))

    @torch.no_grad()
    def logits(kv):
        cache = tq.TQCache(model.config, kv=kv, calibration=file)
        return model(input_ids=unseen, past_key_values=cache).logits

    error = {kv: float((logits(kv) - logits("fp32")).square().mean()) for kv in ("k=lr3,v=tq4", "tq4")}
    assert error["k=lr3,v=tq4"] < 0.7 * error["tq4"]
    cache = tq.TQCache(model.config, kv="k=lr3,v=tq4", calibration=file)
    stats = model(input_ids=unseen, past_key_values=cache).past_key_values.stats()
    assert stats.layers[0].used == 4 * file.shape.layers[0].num_kv_heads * 60 * (32 * 3 // 8 + 2 + 32 * 4 // 8 + 2)


def test_the_moments_are_those_of_our_own_forward():
    """`tiny` through transformers and through this project's layers: the same coordinates, up to rounding."""
    from transformers import AutoModelForCausalLM

    from haarkv.models.catalog import TINY

    subject = load_subject("tiny", executor="reference", dtype="float32")
    window = [1 + i % 4000 for i in range(7, 7 + 96 * 31, 31)]
    learning = subject.learn([torch.tensor(window)], [])
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    file = tq.calibrate(model, [window])
    assert file.fingerprint == subject.fingerprint
    assert file.calibration.context is None
    for ours, theirs in zip(learning.layers, file.calibration.k, strict=True):
        torch.testing.assert_close(theirs.mean, ours.mean, rtol=0.02, atol=0.02)
        torch.testing.assert_close(theirs.weights[:, :8], ours.weights[:, :8], rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("family", SMALL)
def test_coordinates_hold_for_any_text_where_keys_turn_and_else_as_far_as_the_windows(family):
    model = uneven(family)
    file = tq.calibrate(model, [*windows(5, 40), *windows(1, 50)])
    cache = tq.TQCache(model.config, kv="k=lr3,v=tq4", calibration=file)
    model(input_ids=torch.tensor(windows(1, 50)), past_key_values=cache)
    if family != "gpt2":
        assert file.calibration.context is None
        model(input_ids=torch.tensor([[5]]), past_key_values=cache)
        return
    assert file.calibration.context == 50
    with pytest.raises(InputError, match="holds for sequences of up to 50 tokens, and this one may have 51"):
        model(input_ids=torch.tensor([[5]]), past_key_values=cache)


def test_what_cannot_be_learned_or_read_is_one_line(tmp_path):
    model = SMALL["qwen2"]().eval()
    with pytest.raises(InputError, match="needs windows of tokens"):
        tq.calibrate(model, [])
    with pytest.raises(InputError, match="none may be empty"):
        tq.calibrate(model, [[1, 2], []])
    path = tmp_path / "learned.safetensors"
    tq.calibrate(model, windows(1, 40), out=path)
    with safe_open(path, "pt") as file:
        assert file.metadata()["haarkv_calibration"] == "4"
    assert calibration_file.load(path).shape.layers[0].head_dim == 32
    with pytest.raises(InputError, match="made for another model"):
        tq.TQCache(SMALL["gpt_neox"]().config, kv="k=lr3,v=tq4", calibration=path)
