"""The reference against transformers' `Qwen3ForCausalLM` on the same weights, fp32: prefill and 32 decode steps."""

import pytest
import torch
from small_models import dense_config
from transformers import Qwen3Config as HFConfig
from transformers import Qwen3ForCausalLM
from transformers_judge import draw_weights, worst_error

from haarkv.models.base import DecoderModel
from haarkv.models.catalog import TINY, load_model
from haarkv.models.weights import assemble
from haarkv.validation import bounds

CONFIGS = {
    "as_14b": {"heads": 10, "kv_heads": 2, "head_dim": 128, "tied": False, "theta": 1e6},
    "mha_64": {"heads": 4, "kv_heads": 4, "head_dim": 64, "tied": True, "theta": 1e4},
    "one_kv_head_256": {"heads": 6, "kv_heads": 1, "head_dim": 256, "tied": False, "theta": 5e5},
    "as_0.6b": {"heads": 8, "kv_heads": 4, "head_dim": 128, "tied": True, "theta": 1e6},
    "as_32b": {"heads": 16, "kv_heads": 2, "head_dim": 64, "tied": False, "theta": 1e7},
    "wider_than_hidden": {"heads": 3, "kv_heads": 3, "head_dim": 256, "tied": True, "theta": 1e6},
}


def build(heads, kv_heads, head_dim, tied, theta):
    """A transformers model with weights large enough for attention to matter, and ours on the same tensors."""
    torch.manual_seed(0)
    hf_config = HFConfig(
        vocab_size=300, hidden_size=192, intermediate_size=320, num_hidden_layers=3, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, tie_word_embeddings=tied, max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": theta}, attn_implementation="eager",
    )  # fmt: skip
    theirs = Qwen3ForCausalLM(hf_config).eval()
    draw_weights(theirs)
    config = dense_config(
        model_type="qwen3", hidden_size=192, num_layers=3, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        intermediate_size=320, vocab_size=300, rope_theta=theta, tie_word_embeddings=tied, max_position_embeddings=1024,
    )  # fmt: skip
    tensors = dict(theirs.state_dict())
    return theirs, DecoderModel.of(config, assemble(config, tensors.__getitem__))


@pytest.mark.parametrize("kv", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name, kv):
    theirs, ours = build(**CONFIGS[name])
    prompt = torch.randint(0, 300, (1, 150), generator=torch.Generator().manual_seed(1))
    worst, cache = worst_error(theirs, ours, kv, prompt)
    assert worst <= bounds.TRANSFORMERS_LOGITS
    if kv == "bf16":
        assert cache.ties <= bounds.BF16_TIES * cache.values


@pytest.mark.parametrize("kv", ["fp32", "bf16"])
def test_logits_of_the_checkpoint_that_ships_equal_transformers(kv):
    theirs = Qwen3ForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = torch.randint(0, 4096, (1, 200), generator=torch.Generator().manual_seed(0))
    worst, _ = worst_error(theirs, load_model("tiny"), kv, prompt)
    assert worst <= bounds.TRANSFORMERS_LOGITS


def test_the_comparison_sees_a_wrong_cache():
    """With 4-bit storage the same comparison is far outside its bound: it does depend on K and V."""
    theirs, ours = build(**CONFIGS["as_14b"])
    prompt = torch.randint(0, 300, (1, 150), generator=torch.Generator().manual_seed(1))
    worst, _ = worst_error(theirs, ours, "tq4", prompt)
    assert worst > 100 * bounds.TRANSFORMERS_LOGITS
