"""Layers of a small model by the NPU programs in the interpreter, held against the reference."""

import torch
from bounds import BF16_TIES
from npu_layers import faint, telling, with_leftovers, worst_token
from small_models import SMALL, cache_tensors, new_cache, resized, small_model

from haarkv.executors import catalog
from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.bounds import NPU_LAYER_ADDED
from haarkv.validation.ops.caches import windows_of

TQ4_SPEC = KVSpec("tq4")
CONFIG = resized(SMALL, hidden_size=128, intermediate_size=128, num_layers=2, max_position_embeddings=1024)


def filled(config, spec, lengths, seed):
    """A cache that holds so many tokens of each sequence, random K and V, and its bookkeeping with permuted blocks."""
    blocks = max(16, sum(length // 128 + 2 for length in lengths))
    cache = with_leftovers(new_cache(config, spec, block_size=128, num_blocks=blocks))
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    paging = PagedSequences(blocks, 128, order)
    sequences = [paging.add() for _ in lengths]
    generator = torch.Generator().manual_seed(seed)
    for sequence, length in zip(sequences, lengths, strict=True):
        for begin in range(0, length, pieces := cache.most_new_tokens or max(length, 1)):
            count = min(pieces, length - begin)
            batch = paging.batch([sequence], [count])
            for layer in range(config.num_layers):
                sizes = count, config.heads.num_kv_heads, config.heads.head_dim
                k, v = (torch.randn(sizes, generator=generator) for _ in "kv")
                cache.write(layer, k, v, batch)
    return cache, paging, sequences


LAYER_CASES = {
    "decode, GQA 5": ((10, 2), [1, 1, 1], [299, 0, 640]),
    "decode, GQA 1": ((3, 3), [1, 1], [127, 128]),
    "decode, GQA 8": ((8, 1), [1], [4]),
    "prefill after a stored prefix, GQA 5": ((10, 2), [33, 5], [250, 0]),
    "prefill over two tiles, GQA 2": ((4, 2), [130], [3]),
}


DECODE, PREFILL = LAYER_CASES["decode, GQA 5"], LAYER_CASES["prefill after a stored prefix, GQA 5"]


def same_bytes(ours, theirs, field):
    """Whether a field of two caches holds the same; an FP32 norm may be off by its last bit: K was summed otherwise."""
    return torch.allclose(ours, theirs, rtol=2.0**-22, atol=0) if field == "norm" else torch.equal(ours, theirs)


def but_for_ties(ours, theirs, most):
    """Whether BF16 numbers are equal, but for fewer than `most` that are the other neighbour: FP32 sums in another order."""
    steps = (ours.view(torch.int16).int() - theirs.view(torch.int16).int()).abs()
    return steps.max() <= 1 and steps.sum() < most


def check_layer(heads, new, stored, spec=TQ4_SPEC, layers=range(1, 2), config=CONFIG):
    """A cache, and what a layer adds to a hidden state, by the programs and by the reference."""
    error, wrong = error_of_layer(heads, new, stored, spec, layers, config)
    assert not wrong
    assert error < NPU_LAYER_ADDED


def error_of_layer(heads, new, stored, spec=TQ4_SPEC, layers=range(1, 2), config=CONFIG, plant=None):
    """How far off is what a layer adds, and fields of which not every byte in the cache is the reference's.

    Args:
        heads: of queries and of keys; None for those of the config.
        plant: program -> one with a fault.
    """
    if heads:
        config = resized(config, num_heads=heads[0], num_kv_heads=heads[1])
    model = telling(small_model(config, seed=3, dtype=torch.bfloat16))
    hidden = faint(sum(new), config.hidden_size, torch.Generator().manual_seed(2))
    results, windows = [], []
    candidate = catalog.create("npu", model, spec.plan(config.num_layers), "sim")
    if plant:
        call = candidate._runner.call
        candidate._runner.call = lambda program, tensors: call(plant(program), tensors)
    for executor in (ReferenceExecutor(model), candidate):
        cache, paging, sequences = filled(config, spec, stored, seed=7)
        before = [tensor.clone() for *_, tensor in cache_tensors(cache)]
        in_bf16 = [tensor.clone() for tensor in windows_of(cache)]
        out = executor.layers(hidden, layers, paging.batch(sequences, new), cache)
        results.append((out.float(), list(cache_tensors(cache))))
        # The layers that ran have stored something.
        ran = [(old, tensor) for old, (layer, *_, tensor) in zip(before, results[-1][1], strict=True) if layer in layers]
        assert not any(torch.equal(*pair) for pair in ran)
        windows.append(windows_of(cache))
        changed = sum(not torch.equal(*pair) for pair in zip(in_bf16, windows[-1], strict=True))
        assert changed == (2 * len(layers) if in_bf16 else 0)
    (reference, reference_cache), (ours, our_cache) = results
    # Every slot of every layer: the new ones as the reference stores them, all others as they were.
    wrong = [
        f"{side} {field}"
        for (_, side, field, theirs), (*_, tensor) in zip(reference_cache, our_cache, strict=True)
        if not same_bytes(tensor, theirs, field)
    ]
    most = sum(new) * config.heads.num_kv_heads * config.heads.head_dim * BF16_TIES + 1
    wrong += ["what stays in BF16"] * (not all(but_for_ties(*pair, most) for pair in zip(*windows, strict=True)))
    return worst_token(ours, reference), wrong
