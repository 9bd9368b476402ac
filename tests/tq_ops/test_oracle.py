"""The reference's ops and its BF16 layer against float64, attention and the layer one token and one head at a time.

The contract of `test_op_tables.py` holds other tables against the reference; whole models are held against transformers.
"""

from __future__ import annotations

import bounds
import pytest
import torch
from op_contract import suite
from op_contract.cases import HOST, Plain
from small_models import CONFIGS, SMALL, new_cache, new_paging, random_tokens, small_model
from torch import Tensor

from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops import reference


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- The formulas --------------------------------------------------------------------------------------------------------
def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x @ x / len(x) + eps).sqrt() * weight


def rope(x: Tensor, position: int, theta: float) -> Tensor:
    """One head's vector, its pairs (i, i + D/2) turned by position * theta^(-2i/D)."""
    low, high = x.chunk(2)
    angle = position * theta ** (-torch.arange(len(low), dtype=torch.float64) / len(low))
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()])


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, block: int | None = None) -> Tensor:
    """One query of one head over everything it may see.

    With `block`, as a BF16 device does: an online softmax over a block of tokens at a time, the probabilities of each and the
    result in BF16.
    """
    scores = keys @ q * scale
    if block is None:
        return scores.softmax(0) @ values
    most, total, out = scores.new_tensor(-torch.inf), scores.new_zeros(()), scores.new_zeros(len(q))
    for part, value_block in zip(scores.split(block), values.split(block), strict=True):
        weights, new = bf16((part - part.max()).exp()), torch.maximum(most, part.max())
        old, now = (most - new).exp(), (part.max() - new).exp()
        out, total, most = out * old + weights @ value_block * now, total * old + weights.sum() * now, new
    return bf16(out / total)


def decoder_layer(hidden: Tensor, weights: dict[str, Tensor], config, block: int | None) -> Tensor:
    """One layer over a whole sequence [T, hidden_size].

    With `block`, activations are rounded to BF16 where the published device rounds them: both norms of the hidden state, q
    after RoPE, attention, the product of SwiGLU, and the state after each residual.
    """
    heads, eps, theta = config.heads, config.final_norm.eps, config.common.attention.rope.theta
    round_to = bf16 if block else lambda x: x
    keys, values, out = [], [], []
    for position, h in enumerate(hidden):
        x = round_to(rms_norm(h, weights["input_norm"], eps))
        q, k, v = ((weights[f"{name}_proj"] @ x).view(-1, heads.head_dim) for name in "qkv")
        keys.append(torch.stack([rope(rms_norm(head, weights["k_norm"], eps), position, theta) for head in k]))
        values.append(v)
        head_outputs = []
        for head, query in enumerate(q):
            query, kv_head = round_to(rope(rms_norm(query, weights["q_norm"], eps), position, theta)), head * len(k) // len(q)
            visible = (torch.stack(side)[:, kv_head] for side in (keys, values))
            head_outputs.append(attend(query, *visible, heads.head_dim**-0.5, block))
        h = round_to(h + weights["o_proj"] @ torch.cat(head_outputs))
        x = round_to(rms_norm(h, weights["post_norm"], eps))
        gate, up = weights["gate_proj"] @ x, weights["up_proj"] @ x
        out.append(round_to(h + weights["down_proj"] @ round_to(gate * gate.sigmoid() * up)))
    return torch.stack(out)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bf16_layer_rounds_where_the_device_rounds(name):
    """Given the same BF16 input, nearly every number of the layer's output has the very bits of the oracle's."""
    config, tokens = CONFIGS[name], random_tokens(CONFIGS[name], 13, 7)
    model, cache = small_model(config, dtype=torch.bfloat16), new_cache(config, "fp32")
    executor, paging = ReferenceExecutor(model), new_paging(cache)
    batch, hidden = paging.batch([paging.add()], [len(tokens)]), model.weights.embedding[tokens]
    for index, layer in enumerate(model.weights.layers):
        weights = {field: tensor.double() for field, _, tensor in layer.named_tensors()}
        expected, fp64_output = (decoder_layer(hidden.double(), weights, config, block) for block in (cache.block_size, None))
        hidden = executor.layers(hidden, range(index, index + 1), batch, cache)
        assert hidden.dtype == torch.bfloat16
        assert (hidden.double() != expected).double().mean() <= bounds.ORACLE_BF16_LAYER_DIFFERENT
        assert (hidden.double() != bf16(fp64_output)).double().mean() > 2 * bounds.ORACLE_BF16_LAYER_DIFFERENT


# -- Ops one by one ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", [case for case in suite.named_cases() if isinstance(case, Plain)], ids=str)
def test_an_op_is_its_formula_rounded_once(case):
    """In the contract the reference's honest runs would err with it."""
    ours, exact = getattr(reference, case.op)(*case.arguments(HOST)), case.expected()
    off = bounds.ORACLE_OP * exact.abs().clamp(min=max(1.0, float(exact.std())))
    assert ours.dtype == (torch.float32 if case.op in ("linear", "rope") else case.dtype)
    assert ((exact - off).to(ours.dtype) <= ours).all()
    assert (ours <= (exact + off).to(ours.dtype)).all()


@pytest.mark.parametrize("size", [1e-3, 100.0])
def test_rms_norm_of_small_and_large_vectors(size):
    x, weight = normal(5, 48, seed=0) * size, normal(48, seed=1)
    expected = torch.stack([rms_norm(row, weight.double(), 1e-6) for row in x.double()])
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-6).double(), expected, rtol=0, atol=bounds.ORACLE_OP)


# -- Attention and store -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("lengths", "new"),
    [((1,), (1,)), ((29,), (1,)), ((12, 1, 21), (12, 1, 4))],
    ids=["one token", "decode over several blocks", "ragged prefill, one of them continued"],
)
def test_paged_attention_of_bf16_queries_rounds_probabilities_block_by_block(lengths, new):
    """Of the last new tokens of each sequence; `kv/test_plan.py` has FP32 queries and formats that round."""
    heads, scale, size = SMALL.heads, SMALL.attentions[0].scale, 8
    cache = new_cache(SMALL, "fp32", 12, size)
    paging, group = new_paging(cache, [5, 0, 7, 2, 9, 4, 11, 6, 1, 8, 3, 10]), heads.num_heads // heads.num_kv_heads
    k, v = ([normal(n, heads.num_kv_heads, heads.head_dim, seed=seed + n) for n in lengths] for seed in (1, 2))
    ids = [paging.add() for _ in lengths]
    for row, (length, count) in enumerate(zip(lengths, new, strict=True)):
        if length > count:
            older = paging.batch([ids[row]], [length - count])
            reference.store_kv(k[row][:-count], v[row][:-count], cache.view(1, older))
    batch = paging.batch(ids, new)
    newest = (torch.cat([x[-count:] for x, count in zip(side, new, strict=True)]) for side in (k, v))
    reference.store_kv(*newest, cache.view(1, batch))
    q = normal(sum(new), heads.num_heads, heads.head_dim, seed=3).bfloat16()
    output = reference.paged_attention(q, cache.view(1, batch), scale).double()

    def expected(block=None):
        rows = iter(q.double())
        return torch.stack([
            torch.stack([
                attend(query, keys[: at + 1, head // group], values[: at + 1, head // group], scale, block)
                for head, query in enumerate(next(rows))
            ])
            for keys, values, count in zip(k, v, new, strict=True)
            for at in range(len(keys) - count, len(keys))
        ])  # fmt: skip

    k, v = ([x.double() for x in side] for side in (k, v))
    rounded, plain = expected(size), bf16(expected())
    # A probability or a result beside a rounding point may fall the other way: few do.
    assert (output != rounded).double().mean() <= 0.005
    torch.testing.assert_close(output, rounded, rtol=2**-7, atol=2**-9)
    if sum(lengths) > 1:
        assert (output != plain).double().mean() > 0.05  # the rounding of probabilities is visible, so it is really tested
