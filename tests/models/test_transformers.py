"""The reference against transformers' `Qwen3ForCausalLM` on the same weights, fp32: prefill and 32 decode steps.

With `fp32` storage the comparison is with transformers' own `DynamicCache`. With `bf16` storage transformers gets a cache
that rounds to BF16 as ours does. Two FP32 computations of one K differ in their last bits, so a few values round the other
way; such a tie is settled as ours, counted, and nothing else is.
"""

import pytest
import torch
from transformers import DynamicCache, Qwen3ForCausalLM
from transformers import Qwen3Config as HFConfig

from haarkv.engine.generation import prefill_in_chunks
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import DecoderConfig, DecoderModel
from haarkv.models.catalog import TINY, load_model
from haarkv.models.rope import RopeTable
from haarkv.models.weights import assemble
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation import bounds

STEPS = 32
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
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 2.0)
            else:
                parameter.normal_(0, 0.6 if "embed" in name else parameter.shape[1] ** -0.5)
    config = DecoderConfig(
        model_type="qwen3", hidden_size=192, num_layers=3, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        intermediate_size=320, vocab_size=300, rope_theta=theta, tie_word_embeddings=tied, max_position_embeddings=1024,
    )  # fmt: skip
    tensors = dict(theirs.state_dict())
    return theirs, DecoderModel(config, assemble(config, tensors.__getitem__), RopeTable(config))


class Bf16Cache(DynamicCache):
    """Rounds K and V to BF16 as they are stored; a value within rounding noise of a BF16 tie is settled as `ours` has it."""

    def __init__(self, ours):
        super().__init__()
        self.ours, self.ties, self.values = ours, 0, 0

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        begin = self.get_seq_length(layer_idx)
        stored = self.ours.read(layer_idx, torch.arange(self.ours.num_blocks)[None])
        rounded = []
        for x, paged in zip((key_states, value_states), stored, strict=True):
            r, mine = x.bfloat16().float(), paged[:, :, begin : begin + x.shape[2]]
            middle = (r + mine) / 2
            tie = (r != mine) & ((x - middle).abs() <= bounds.BF16_TIE_NOISE * x.abs().amax(-1, keepdim=True))
            self.ties += int(tie.sum())
            self.values += x.numel()
            rounded.append(torch.where(tie, mine, r))
        return super().update(*rounded, layer_idx, *args, **kwargs)


def worst_error(theirs, ours, kv, prompt):
    """Largest absolute difference of logits over prefill and STEPS greedy steps, and the ties that were settled."""
    executor = ReferenceExecutor(ours)
    blocks = -(-(prompt.shape[1] + STEPS) // 128)
    cache = PagedKVCache(
        KVSpec(kv).plan(ours.config.num_layers), num_kv_heads=ours.config.num_kv_heads, head_dim=ours.config.head_dim,
        num_blocks=blocks,
    )  # fmt: skip
    paging = PagedSequences(blocks, 128)
    sequence = paging.add()
    reference = DynamicCache() if kv == "fp32" else Bf16Cache(cache)
    worst, tokens = 0.0, prompt
    mine = prefill_in_chunks(executor, prompt.tolist(), [sequence], paging, cache, chunk=64)
    for _ in range(STEPS + 1):
        with torch.inference_mode():
            logits = theirs(input_ids=tokens, past_key_values=reference, use_cache=True).logits[:, -1]
        worst = max(worst, (mine - logits).abs().max().item())
        tokens = logits.argmax(-1)[None]
        if paging.length(sequence) < prompt.shape[1] + STEPS:
            mine = executor.decode(tokens[0], paging.batch([sequence], [1]), cache)
    return worst, reference


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
