"""Layers as NPU programs, held against the reference: of `tiny`, of a small model, of other families; made-up learned keys."""

import math
from dataclasses import replace

import torch
from bounds import BF16_TIES
from op_contract.caches import bf16_windows
from small_models import SMALL, cache_tensors, gemma_config, new_cache, resize_config, small_config, small_model

from haarkv.executors import catalog
from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.bounds import POISSON_SIGMAS


def telling(model):
    """The model with MLPs that add little, so that what attention adds to a `faint` hidden state is most of the result."""
    layers = tuple(layer.map(lambda field, x: x * 2.0**-5 if field == "down_proj" else x) for layer in model.weights.layers)
    return replace(model, weights=replace(model.weights, layers=layers))


def faint(tokens, hidden_size, generator):
    """Hidden states [tokens, hidden] BF16 so short that what a layer adds to them is all that can be seen of them.

    A layer norms what it is given, so what it adds is as long as ever: 20 to 200 times as long as these.
    """
    return (torch.randn(tokens, hidden_size, generator=generator) * 2.0**-7).bfloat16()


def worst_token(ours, theirs):
    """The largest error of a token's state [T, hidden], relative to that one's length; NaN if any is NaN."""
    ours, theirs = ours.float(), theirs.float()
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).max())


def with_leftovers(cache):
    """The cache, in every slot what other sequences left there, as long as keys and values are: not one of it may be seen."""
    generator = torch.Generator().manual_seed(4)
    for layer, _, _, tensor in cache_tensors(cache):
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) if tensor.dim() > 3 else 12.0)
        else:
            levels = 16 if tensor.shape[-1] == cache.kv[layer].shape.head_dim else 256
            tensor.copy_(torch.randint(0, levels, tensor.shape, generator=generator))
    for tensor in bf16_windows(cache):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


KV = "k=lr4,v=tq4"


def learned_spec(config, kv=KV, **options):
    """Made-up coordinates for a model of that shape."""
    heads = config.heads
    return KVSpec(kv, calibration=synthetic.calibration(config.num_layers, heads.num_kv_heads, heads.head_dim, **options))


WINDOW = 40
_SIZES = {"num_layers": 2, "intermediate_size": 192, "max_position_embeddings": 2048, "head_norms": False}


def _gemma3():
    config = gemma_config(hidden_size=128, window=WINDOW)
    return replace(config, layers=tuple(replace(layer, mlp=replace(layer.mlp, width=192)) for layer in config.layers))


CONFIGS = {
    "llama": small_config("llama", hidden_size=192, num_heads=9, num_kv_heads=3, head_dim=64, **_SIZES),
    "qwen2": small_config("qwen2", hidden_size=128, num_heads=14, num_kv_heads=2, head_dim=64, bias=True, **_SIZES),
    "gemma3": _gemma3(),
}
"""By family. The first layer of `gemma3` has a window, the second has none; those of the others are alike."""


TQ4_SPEC = KVSpec("tq4")
CONFIG = resize_config(SMALL, hidden_size=128, intermediate_size=128, num_layers=2, max_position_embeddings=1024)


def fill_cache(config, spec, lengths, seed):
    """A cache that holds this many tokens of each sequence, random K and V, and its bookkeeping with permuted blocks."""
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
                cache.view(layer, batch).write(k, v)
    return cache, paging, sequences


def same_bytes(ours, theirs, most):
    """Whether a field of two caches holds the same; numbers of K that was summed otherwise may be off: FP32 by the last bit,
    fewer than `most` in BF16 by a neighbour."""
    if ours.dtype == torch.float32:
        return torch.allclose(ours, theirs, rtol=2.0**-22, atol=0)
    return but_for_ties(ours, theirs, most) if ours.dtype == torch.bfloat16 else torch.equal(ours, theirs)


def but_for_ties(ours, theirs, most):
    """Whether BF16 numbers are equal, but for fewer than `most` that are the other neighbour: FP32 sums in another order."""
    steps = (ours.view(torch.int16).int() - theirs.view(torch.int16).int()).abs()
    return steps.max() <= 1 and steps.sum() < most


def error_of_layer(new, past, spec, layers, config, plant=None):
    """How far off is what a layer adds by the programs, and fields of which not every byte in the cache is the reference's.

    Args:
        plant: program -> one with a fault.
    """
    model = telling(small_model(config, seed=3, dtype=torch.bfloat16))
    hidden = faint(sum(new), config.hidden_size, torch.Generator().manual_seed(2))
    results, windows = [], []
    candidate = catalog.create("npu", model, spec.plan(config.num_layers), "sim")
    if plant:
        call = candidate._runner.call
        candidate._runner.call = lambda program, tensors: call(plant(program), tensors)
    for executor in (ReferenceExecutor(model), candidate):
        cache, paging, sequences = fill_cache(config, spec, past, seed=7)
        before = [tensor.clone() for *_, tensor in cache_tensors(cache)]
        in_bf16 = [tensor.clone() for tensor in bf16_windows(cache)]
        out = executor.layers(hidden, layers, paging.batch(sequences, new), cache)
        results.append((out.float(), list(cache_tensors(cache))))
        # The layers that ran have stored something.
        ran = [(old, tensor) for old, (layer, *_, tensor) in zip(before, results[-1][1], strict=True) if layer in layers]
        assert not any(torch.equal(*pair) for pair in ran)
        windows.append(bf16_windows(cache))
        change_count = sum(not torch.equal(*pair) for pair in zip(in_bf16, windows[-1], strict=True))
        assert change_count == (2 * len(layers) if in_bf16 else 0)
    (reference, reference_cache), (ours, our_cache) = results
    # Every slot of every layer: the new ones as the reference stores them, all others as they were.
    often = 2 * sum(new) * config.heads.num_kv_heads * config.heads.head_dim * BF16_TIES + 0.5
    most = often + POISSON_SIGMAS * math.sqrt(often)  # a count of rare events
    wrong = [
        f"{side} {field}"
        for (_, side, field, theirs), (*_, tensor) in zip(reference_cache, our_cache, strict=True)
        if not same_bytes(tensor, theirs, most)
    ]
    wrong += ["what stays in BF16"] * (not all(but_for_ties(*pair, most) for pair in zip(*windows, strict=True)))
    return worst_token(ours, reference), wrong
