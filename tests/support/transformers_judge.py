"""Our reference beside a transformers model on the same weights: the largest difference of logits, prefill and decode.

With `fp32` storage the comparison is with transformers' own `DynamicCache`. With `bf16` storage transformers gets a cache
that rounds to BF16 as ours does. Two FP32 computations of one K differ in their last bits, so a few values round the other
way; such a tie is settled as ours, counted, and nothing else is.
"""

import torch
from transformers import DynamicCache

from haarkv.engine.generation import prefill_in_chunks
from haarkv.executors.base import verify
from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation import bounds

STEPS = 32


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


def draw_weights(theirs):
    """Weights large enough for attention to matter, norms and biases that are not their defaults."""
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 2.0)
            else:
                parameter.normal_(0, 0.6 if "embed" in name else parameter.shape[-1] ** -0.5)


def worst_error(theirs, ours, kv, prompt):
    """Largest absolute difference of logits over prefill and STEPS greedy steps, and the ties that were settled."""
    executor = ReferenceExecutor(ours)
    blocks = -(-(prompt.shape[1] + STEPS) // 128)
    cache = PagedKVCache(
        KVSpec(kv).plan(ours.config.num_layers), ours.config.kv_shapes,
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
            mine = verify(executor, tokens[0], paging.batch([sequence], [1]), cache)
    return worst, reference
