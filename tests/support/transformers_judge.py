"""Our reference beside a transformers model on the same weights: the largest difference of logits, prefill and decode."""

import torch
import transformers
from checkpoints import byte_tokenizer
from transformers import DynamicCache

from haarkv.engine.generation import prefill_in_chunks
from haarkv.executors.base import verify
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import new_cache
from haarkv.tq_ops.kv.plan import KVSpec

# Its bars go to stderr, where tests read what the command says.
transformers.utils.logging.disable_progress_bar()

STEPS = 32


def draw_weights(theirs):
    """Weights large enough for attention to matter, norms and biases that are not their defaults."""
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4.0, 1.0)  # a state forgets within a token or within a hundred
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 2.0)
            else:
                parameter.normal_(0, 0.6 if "embed" in name else parameter.shape[-1] ** -0.5)


def worst_error(theirs, ours, kv, prompt, steps=STEPS, chunk=64):
    """Largest difference of logits over prefill and greedy steps.

    In units of the logits' standard deviation, where that is above 1: an embedding that is scaled scales a tied head's logits.
    """
    executor, plan = ReferenceExecutor(ours), KVSpec(kv).plan(ours.config.num_layers)
    cache, paging = new_cache(ours.config, plan, sequences=1, tokens=prompt.shape[1] + steps)
    sequence = paging.add()
    reference = DynamicCache(config=theirs.config if ours.config.state_shapes else None)
    worst, tokens = 0.0, prompt
    mine = prefill_in_chunks(executor, prompt.tolist(), [sequence], paging, cache, chunk=chunk)
    for _ in range(steps + 1):
        with torch.inference_mode():
            logits = theirs(input_ids=tokens, past_key_values=reference, use_cache=True).logits[:, -1]
        worst = max(worst, ((mine - logits).abs().max() / logits.std().clamp(min=1.0)).item())
        tokens = logits.argmax(-1)[None]
        if paging.length(sequence) < prompt.shape[1] + steps:
            mine = verify(executor, tokens[0], paging.batch([sequence], [1]), cache)
    return worst


def saved_random(folder, family, entries):
    """A model of a family of transformers, such as Qwen3, with drawn weights, saved with a tokenizer of one token a byte."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**entries)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw_weights(theirs)
    theirs.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return theirs
