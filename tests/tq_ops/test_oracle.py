"""The reference executor, its ops and the quantized formats against the float64 oracle; and that the oracle is not blind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import bounds
import numpy as np
import oracles
import pytest
import torch
from small_models import (
    CONFIGS,
    SMALL,
    at_slots,
    decode,
    new_cache,
    new_paging,
    prefill,
    random_tokens,
    small_model,
    table_of,
    weights_as_numpy,
)

from haarkv.codebooks import Codebook, haar_rotation, lloyd_max
from haarkv.engine.generation import generate
from haarkv.executors.base import verify
from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops import formats, reference
from haarkv.tq_ops.formats.rotated import choose_levels


def tables(layer: int, head_dim: int) -> oracles.Tables:
    book = lloyd_max(4, head_dim)
    return oracles.Tables(*(t.double().numpy() for t in (*book, haar_rotation(layer, head_dim))))


def shapes_of(config) -> oracles.Shapes:
    return oracles.Shapes(*config.heads, config.common.attention.rope.theta, config.final_norm.eps)


@dataclass
class FromCache:
    """An oracle's store that compares each vector with what the executor stored of it, and goes on with the latter.

    Where rounding explains a difference, it must not grow into the layers and tokens that follow: so the logits are
    compared with the tight bound of full precision, whatever was rounded where.
    """

    cache: object
    slots: list[int]
    verdict: oracles.Verdict = field(default_factory=oracles.Verdict)
    first_unexplained: tuple[int, str] | None = None

    def __post_init__(self):
        count, size = len(self.slots), self.cache.block_size
        self._block, self._offset = torch.tensor(self.slots) // size, torch.tensor(self.slots) % size
        table = torch.arange(self.cache.num_blocks, dtype=torch.int32)[None]
        # A layer each, and of each side the slots' vectors [slots, Hkv, D].
        self._restored = [
            {side: x[0].transpose(0, 1)[self.slots].double().numpy() for side, x in zip("kv", pair, strict=True)}
            for pair in (self.cache.read(layer, table) for layer in range(self.cache.num_layers))
        ]
        assert len(set(self.slots)) == count

    def __call__(self, layer, side, head, position, x):
        kv_format = getattr(self.cache, f"{side}_format")(layer).name
        stored = getattr(self.cache, f"{side}_fields")(layer)
        place = (self._block[position], head, self._offset[position])
        fields = {name: as_numpy(tensor[place]) for name, tensor in stored.items()}
        restored = self._restored[layer][side][position, head]
        here = oracles.judge(kv_format, x, fields, tables(layer, len(x)), bounds.ORACLE_KV)
        back = oracles.judge_restored(kv_format, restored, fields, tables(layer, len(x)), bounds.FORMAT_FP32)
        for verdict in (here, back):
            self.verdict.values += verdict.values
            self.verdict.different += verdict.different
            self.verdict.unexplained += verdict.unexplained
        if here.unexplained + back.unexplained and self.first_unexplained is None:
            self.first_unexplained = (layer, side)
        # FP32 noise stays in the comparison; only what is rounded to fewer bits is taken over.
        return x if kv_format == "fp32" else restored


def as_numpy(tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


@dataclass
class Outcome:
    """A prompt after another and some decode steps through the reference executor, in blocks handed out in disorder."""

    config: object
    kv: str
    prompts: list[list[int]]
    continued: list[list[int]]
    seed: int = 0

    def __post_init__(self):
        self.model = small_model(self.config, self.seed)
        self.executor = ReferenceExecutor(self.model)
        self.cache = new_cache(self.config, self.kv)
        self.paging = new_paging(self.cache, order=[7, 2, 11, 0, 9, 4, 1, 10, 3, 8, 6, 5])
        self.sequences = [self.paging.add() for _ in self.prompts]
        logits = [prefill(self.executor, self.cache, self.paging, self.sequences, self.prompts)]
        for step in zip(*self.continued, strict=True):
            logits.append(decode(self.executor, self.cache, self.paging, self.sequences, step))
        self.logits = torch.stack(logits, dim=1).double().numpy()  # [B, 1 + steps, vocab]

    def slots(self, row):
        """Where the tokens of a prompt and its continuation lie: a batch of one more token shows the whole block table."""
        tokens = len(self.prompts[row]) + len(self.continued[row])
        blocks = self.paging.batch([self.sequences[row]], [1]).block_table[0].tolist()
        size = self.cache.block_size
        return [blocks[i // size] * size + i % size for i in range(tokens)]

    def oracle(self, row, store):
        """The oracle's logits at the same places, [1 + steps, vocab]."""
        tokens = self.prompts[row] + self.continued[row]
        logits = oracles.model_logits(weights_as_numpy(self.model), shapes_of(self.config), tokens, store)
        return logits[len(self.prompts[row]) - 1 :]


def ragged(config, seed=0):
    prompts = [random_tokens(config, count, seed + count) for count in (9, 1, 14)]
    return prompts, [random_tokens(config, 3, seed + 100 + row) for row in range(3)]


# -- The whole model -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kv", ["fp32", "tq4", "tq4_seed", "k=bf16,v=tq4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_decode_of_a_ragged_batch_equal_the_oracle(name, kv):
    run = Outcome(CONFIGS[name], kv, *ragged(CONFIGS[name]))
    total = oracles.Verdict()
    for row in range(3):
        store = FromCache(run.cache, run.slots(row))
        expected = run.oracle(row, store)
        np.testing.assert_allclose(run.logits[row], expected, rtol=0, atol=bounds.ORACLE_LOGITS)
        assert store.verdict.unexplained == 0
        total.values += store.verdict.values
        total.different += store.verdict.different
    assert total.different <= total.values * (
        bounds.ORACLE_DIFFERENT_BF16 if "bf16" in kv or "seed" in kv else bounds.ORACLE_DIFFERENT_LEVELS
    )
    assert run.logits.std() > 0.5  # the bound is absolute: logits must be of the size it is meant for


@pytest.mark.parametrize("name", CONFIGS)
def test_the_hidden_state_after_every_layer_equals_the_oracle(name):
    config, tokens = CONFIGS[name], random_tokens(CONFIGS[name], 13, 6)
    model, cache = small_model(config), new_cache(config, "fp32")
    executor, paging = ReferenceExecutor(model), new_paging(cache)
    batch = paging.batch([paging.add()], [len(tokens)])
    weights = weights_as_numpy(model)
    ours, expected = model.weights.embedding[tokens], list(weights["embedding"][tokens])
    for index, layer in enumerate(weights["layers"]):
        ours = executor.layers(ours, range(index, index + 1), batch, cache)
        expected = oracles.decoder_layer(expected, layer, shapes_of(config), index)
        np.testing.assert_allclose(ours.double().numpy(), expected, rtol=0, atol=bounds.ORACLE_LOGITS)
    through = executor.layers(model.weights.embedding[tokens], range(config.num_layers), batch, cache)
    assert torch.equal(through, ours)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bf16_layer_rounds_where_the_device_rounds(name):
    """Given the same BF16 input, nearly every number of the layer's output has the very bits of the oracle's."""
    config, tokens = CONFIGS[name], random_tokens(CONFIGS[name], 13, 7)
    model, cache = small_model(config, dtype=torch.bfloat16), new_cache(config, "fp32")
    executor, paging = ReferenceExecutor(model), new_paging(cache)
    batch = paging.batch([paging.add()], [len(tokens)])
    weights, hidden = weights_as_numpy(model), model.weights.embedding[tokens]
    for index, layer in enumerate(weights["layers"]):
        given = list(hidden.double().numpy())
        expected = np.array(oracles.decoder_layer(given, layer, shapes_of(config), index, bf16_block=cache.block_size))
        hidden = executor.layers(hidden, range(index, index + 1), batch, cache)
        assert hidden.dtype == torch.bfloat16
        assert (hidden.double().numpy() != expected).mean() <= bounds.ORACLE_BF16_LAYER_DIFFERENT
        unrounded = np.array(oracles.decoder_layer(given, layer, shapes_of(config), index))
        assert (hidden.double().numpy() != oracles.bf16(unrounded)).mean() > 2 * bounds.ORACLE_BF16_LAYER_DIFFERENT


@pytest.mark.parametrize("kv", ["tq4", "tq4_seed"])
def test_the_oracle_alone_predicts_a_quantized_model(kv):
    """Nothing taken from the cache: the oracle quantizes, packs, restores by itself.

    So a tie that falls the other way grows from layer to layer; even then it stays far below what quantization does.
    """
    run = Outcome(SMALL, kv, [random_tokens(SMALL, 8, 3)], [random_tokens(SMALL, 4, 4)], seed=2)

    def store(layer, side, head, position, x):
        t = tables(layer, len(x))
        if kv == "tq4":
            return oracles.tq4_dequantize(*oracles.tq4_quantize(x, t), t)
        return oracles.tq4_seed_dequantize(*oracles.tq4_seed_quantize(x, t), t)

    error = np.abs(run.logits[0] - run.oracle(0, store)).max()
    full_precision = np.abs(run.logits[0] - run.oracle(0, None)).max()
    assert full_precision > bounds.ORACLE_FAULT  # quantization itself is far above the tolerance, so it is really tested
    assert error <= full_precision * bounds.ORACLE_FREE_RUNNING


def test_greedy_text_equals_the_oracles():
    model = small_model(SMALL, 1)
    prompts = [random_tokens(SMALL, count, count) for count in (6, 11)]
    cache = new_cache(SMALL, "fp32")
    completions, _ = generate(
        ReferenceExecutor(model), cache, new_paging(cache), prompts, max_new_tokens=5, max_context=40, chunk=4
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        expected, lead = oracles.greedy(weights_as_numpy(model), shapes_of(SMALL), prompt, 5)
        assert lead > 2 * bounds.ORACLE_LOGITS
        assert completion.token_ids == expected


# -- The oracle is not blind ---------------------------------------------------------------------------------------------
class WrongReader:
    """A format that stores as it should and reads with something wrong."""

    def __init__(self, inner, dequantize):
        self._inner, self._dequantize = inner, dequantize

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def dequantize(self, fields, layer):
        return self._dequantize(self._inner, fields, layer)


def random_codes(side):
    def fault(cache, layer):
        codes = getattr(cache, f"{side}_fields")(layer)["codes"]
        codes.random_(0, 256, generator=torch.Generator().manual_seed(5))

    return fault


def swap_nibbles(side):
    def fault(cache, layer):
        codes = getattr(cache, f"{side}_fields")(layer)["codes"]
        codes.copy_((codes << 4) | (codes >> 4))

    return fault


def k_stored_as_v(cache, layer):
    for name, tensor in cache.k_fields(layer).items():
        cache.v_fields(layer)[name].copy_(tensor)


def wrong_reader(side, dequantize):
    """Only in the one layer."""

    def fault(cache, layer):
        def read(inner, fields, asked):
            return dequantize(inner, fields, asked) if asked == layer else inner.dequantize(fields, asked)

        right = getattr(cache.states[layer], side)
        wrong = replace(right, kv_format=WrongReader(right.kv_format, read))
        cache._kv[layer] = replace(cache.states[layer], **{side: wrong})

    return fault


def other_layers_rotation(inner, fields, layer):
    return inner.dequantize(fields, layer + 1)


def transposed_rotation(inner, fields, layer):
    rotated = inner.rotated(fields)
    return rotated @ haar_rotation(layer, rotated.shape[-1]).float()


def one_slot_further(cache, layer):
    for fields in (cache.k_fields(layer), cache.v_fields(layer)):
        for tensor in fields.values():
            tensor.copy_(tensor.roll(1, dims=2))


FAULTS = {
    "random K codes": random_codes("k"),
    "random V codes": random_codes("v"),
    "K nibbles swapped": swap_nibbles("k"),
    "V nibbles swapped": swap_nibbles("v"),
    "K stored as V": k_stored_as_v,
    "K read with another layer's rotation": wrong_reader("k", other_layers_rotation),
    "V read with another layer's rotation": wrong_reader("v", other_layers_rotation),
    "K read with the rotation transposed": wrong_reader("k", transposed_rotation),
    "V read with the rotation transposed": wrong_reader("v", transposed_rotation),
    "slot off by one": one_slot_further,
}


@pytest.fixture(scope="module")
def healthy():
    """A prompt of two and a half blocks and a next token, its logits and the oracle's."""
    run = Outcome(SMALL, "tq4", [random_tokens(SMALL, 20, 1)], [random_tokens(SMALL, 1, 2)])
    expected = run.oracle(0, FromCache(run.cache, run.slots(0)))[-1]
    assert np.abs(run.logits[0, -1] - expected).max() <= bounds.ORACLE_LOGITS
    return expected


@pytest.mark.parametrize("layer", [0, SMALL.num_layers - 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_layers_cache_shows_in_logits_and_in_the_stored_numbers(healthy, fault, layer):
    run = Outcome(SMALL, "tq4", [random_tokens(SMALL, 20, 1)], [[]])
    FAULTS[fault](run.cache, layer)
    logits = decode(run.executor, run.cache, run.paging, run.sequences, random_tokens(SMALL, 1, 2))
    assert np.abs(logits[0].numpy() - healthy).max() > bounds.ORACLE_FAULT
    store = FromCache(run.cache, run.slots(0))
    run.oracle(0, store)
    assert store.verdict.unexplained > 100
    assert store.first_unexplained[0] == layer  # the guilty one, although everything after it is off as well


@pytest.mark.parametrize("fault", ["slot", "position", "block table", "sequence length"])
def test_a_wrong_batch_shows_in_logits(healthy, fault):
    run = Outcome(SMALL, "tq4", [random_tokens(SMALL, 20, 1)], [[]])
    batch = run.paging.batch(run.sequences, [1])
    wrong = {
        "slot": {"slot_mapping": batch.slot_mapping + 1},
        "position": {"positions": batch.positions - 1},
        "block table": {"block_table": batch.block_table.flip(1)},
        "sequence length": {"seq_lens": batch.seq_lens - 5},  # ends with the block before: 16 tokens
    }
    logits = verify(run.executor, torch.tensor(random_tokens(SMALL, 1, 2)), replace(batch, **wrong[fault]), run.cache)
    assert np.abs(logits[0].numpy() - healthy).max() > bounds.ORACLE_FAULT


def test_the_logits_depend_on_every_token_of_the_context():
    """Otherwise a wrong context could not show. All variants of the prompt in one batch, in full precision."""
    tokens = random_tokens(SMALL, 20, 1) + random_tokens(SMALL, 1, 2)
    variants = [tokens]
    for position in range(len(tokens)):
        variants.append(tokens.copy())
        variants[-1][position] = (tokens[position] + 1) % SMALL.vocab_size
    cache = new_cache(SMALL, "fp32", num_blocks=3 * len(variants))
    paging = new_paging(cache)
    logits = prefill(ReferenceExecutor(small_model(SMALL)), cache, paging, [paging.add() for _ in variants], variants)
    assert (logits[1:] - logits[0]).abs().amax(dim=1).min() > bounds.ORACLE_FAULT


# -- The formats, one vector at a time -------------------------------------------------------------------------------------
def odd_vectors(head_dim):
    """Ordinary, sparse, lopsided, tiny and huge vectors; [N, D] fp32."""
    generator = torch.Generator().manual_seed(head_dim)
    gaussian = torch.randn(12, head_dim, generator=generator)
    heavy = gaussian[:4] ** 3
    one_hot = torch.eye(head_dim)[[0, head_dim // 2, head_dim - 1]] * torch.tensor([[1.0], [-3.0], [1e-3]])
    constant = torch.full((1, head_dim), -0.25)
    zero = torch.zeros(1, head_dim)
    scaled = gaussian[:6] * torch.tensor([[1e-6], [1e-4], [1e-2], [1e2], [1e4], [1e7]])
    return torch.cat([gaussian, heavy, one_hot, constant, zero, scaled])


@pytest.mark.parametrize("kv", ["tq4", "tq4_seed", "bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_stored_and_restored_vectors_equal_the_oracle(head_dim, kv):
    x, layer, kv_format = odd_vectors(head_dim), 2, formats.get(kv)
    fields = kv_format.quantize(x, layer)
    restored = kv_format.dequantize(fields, layer).double().numpy()
    stored, read = oracles.Verdict(), oracles.Verdict()
    for row, vector in enumerate(x.double().numpy()):
        own = {name: as_numpy(tensor[row]) for name, tensor in fields.items()}
        for verdict, part in (
            (stored, oracles.judge(kv, vector, own, tables(layer, head_dim), bounds.FORMAT_FP32)),
            (read, oracles.judge_restored(kv, restored[row], own, tables(layer, head_dim), bounds.FORMAT_FP32)),
        ):
            verdict.values += part.values
            verdict.different += part.different
            verdict.unexplained += part.unexplained
    assert (stored.unexplained, read.unexplained) == (0, 0)
    assert stored.different <= 2
    assert read.different <= 2


def test_a_value_on_a_boundary_gets_the_level_above_it():
    """With boundaries that BF16 holds exactly and a rotation that does nothing, values lie on them and not just beside."""
    book = lloyd_max(4, 64)
    on_bf16 = Codebook(book.centroids, book.boundaries.bfloat16().float())
    unit = torch.zeros(64)
    unit[:15], unit[15:30] = on_bf16.boundaries, on_bf16.boundaries * (1 + 2.0**-7)
    level, _ = choose_levels(unit, torch.eye(64), on_bf16.boundaries)
    assert level[:15].tolist() == list(range(1, 16))
    expected = (oracles.bf16(unit.numpy())[:, None] >= on_bf16.boundaries.double().numpy()).sum(axis=1)
    assert level.tolist() == expected.tolist()


@pytest.mark.parametrize("error", [0.001, 0.01])
def test_the_oracle_explains_no_more_than_rounding(error):
    """A vector that is off by a tenth or one percent of its length stores levels that no rounding explains."""
    x = odd_vectors(128)[:8]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(9)) * x.norm(dim=-1, keepdim=True) / 128**0.5
    codes = formats.get("tq4").quantize(x + error * noise, 0)["codes"].numpy()
    scales = formats.get("tq4").quantize(x, 0)["scale"].numpy()
    t = tables(0, 128)
    verdicts = [
        oracles.judge("tq4", vector, {"codes": codes[row], "scale": scales[row]}, t, bounds.ORACLE_KV)
        for row, vector in enumerate(x.double().numpy())
    ]
    assert sum(v.different for v in verdicts) > 2000 * error
    assert sum(v.unexplained for v in verdicts) > 0.5 * sum(v.different for v in verdicts)


def test_one_wrong_bit_in_a_scale_is_unexplained():
    x = odd_vectors(128)[:1]
    fields = {name: as_numpy(t[0]) for name, t in formats.get("tq4").quantize(x, 0).items()}
    vector = x[0].double().numpy()
    assert oracles.judge("tq4", vector, fields, tables(0, 128), bounds.ORACLE_KV).unexplained == 0
    fields["scale"] = np.nextafter(fields["scale"], np.float16(np.inf))
    assert oracles.judge("tq4", vector, fields, tables(0, 128), bounds.ORACLE_KV).unexplained == 1


# -- The ops, one by one ---------------------------------------------------------------------------------------------------
def close(ours: torch.Tensor, expected, atol=bounds.ORACLE_OP):
    np.testing.assert_allclose(ours.double().numpy(), np.asarray(expected), rtol=0, atol=atol)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def is_rounded_once(ours: torch.Tensor, exact, error):
    """ours [...] bf16 is the exact value, off by at most `error` before it is rounded, rounded to BF16."""
    exact = np.asarray(exact)
    assert ours.dtype == torch.bfloat16
    values = ours.double().numpy()
    assert (oracles.bf16(exact - error) <= values).all()
    assert (values <= oracles.bf16(exact + error)).all()


@pytest.mark.parametrize("size", [1.0, 1e-3, 100.0])
def test_rms_norm(size):
    x, weight = normal(5, 3, 48) * size, normal(48, seed=1)
    expected = [[oracles.rms_norm(v, weight.double().numpy(), 1e-6) for v in row] for row in x.double().numpy()]
    close(reference.rms_norm(x, weight, 1e-6), expected)
    half = x.bfloat16()
    expected = [[oracles.rms_norm(v, weight.double().numpy(), 1e-6) for v in row] for row in half.double().numpy()]
    is_rounded_once(reference.rms_norm(half, weight, 1e-6), expected, bounds.ORACLE_OP)


@pytest.mark.parametrize("out", [33, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(out, dtype):
    """1100 rows of 1024 are more than a BF16 weight is widened of at a time."""
    width = 48 if out == 33 else 1024
    x, weight = normal(3, width).to(dtype), (normal(out, width, seed=1) * width**-0.5).to(dtype)
    result = reference.linear(x, weight)
    assert result.dtype == torch.float32
    close(result, [[np.dot(w, v) for w in weight.double().numpy()] for v in x.double().numpy()])


@pytest.mark.parametrize("config", [SMALL, CONFIGS["gqa2_d256_tied"]], ids=["theta 1e4", "theta 1e6"])
def test_rope(config):
    positions = torch.tensor([0, 1, 2, 17, 100, 511])
    x = normal(len(positions), 3, config.heads.head_dim)
    ours = reference.rope(x, *table_of(config).at(positions))
    expected = [
        [oracles.rope(head, position, config.common.attention.rope.theta) for head in token]
        for token, position in zip(x.double().numpy(), positions.tolist(), strict=True)
    ]
    # The published tables hold position * inv_freq in FP32: the angle is off by up to 2**-24 of itself for the product and
    # one or two more for inv_freq; numbers of size 3 turn by that. Measured: 1.5e-7 a position, 7.7e-5 at 511.
    for row, position in enumerate(positions.tolist()):
        close(ours[row], expected[row], atol=bounds.ORACLE_OP / 4 + position * 5e-7)


def test_silu_mul():
    gate = torch.cat([normal(200) * 5, torch.tensor([0.0, -0.0, -80.0, 80.0, -1000.0, 1000.0])])
    up = normal(206, seed=1)
    with np.errstate(over="ignore"):
        expected = oracles.silu(gate.double().numpy()) * up.double().numpy()
    ours = reference.silu_mul(gate, up, torch.float32)
    np.testing.assert_allclose(ours.double().numpy(), expected, rtol=1e-6, atol=1e-30)
    half = reference.silu_mul(gate, up, torch.bfloat16)
    is_rounded_once(half, expected, 1e-6 * np.abs(expected))


def attention_case(config, lengths, new_tokens, block_size, order=None):
    """Random K and V of sequences in an fp32 cache, and queries for the last `new_tokens` tokens of each."""
    blocks = sum(-(-n // block_size) for n in lengths) + 3
    cache = new_cache(config, "fp32", blocks, block_size)
    paging = new_paging(cache, order or torch.randperm(blocks, generator=torch.Generator().manual_seed(8)).tolist())
    sequences = [paging.add() for _ in lengths]
    k, v = (normal(sum(lengths), config.heads.num_kv_heads, config.heads.head_dim, seed=seed) for seed in (1, 2))
    before = [n - new for n, new in zip(lengths, new_tokens, strict=True)]
    old_slots = [
        paging.batch([s], [n]).slot_mapping if n else torch.zeros(0).long() for s, n in zip(sequences, before, strict=True)
    ]
    batch = paging.batch(sequences, new_tokens)
    new_slots = batch.slot_mapping.split(list(new_tokens))
    slots = torch.cat([torch.cat(pair) for pair in zip(old_slots, new_slots, strict=True)])
    reference.store_kv(k, v, cache, 1, at_slots(slots))
    q = normal(sum(new_tokens), config.heads.num_heads, config.heads.head_dim, seed=3)
    return (
        cache,
        batch,
        q,
        [part.double().numpy() for part in k.split(lengths)],
        [p.double().numpy() for p in v.split(lengths)],
    )


def expected_attention(attend, config, lengths, new_tokens, q, k, v):
    rows, group = iter(q.double().numpy()), config.heads.num_heads // config.heads.num_kv_heads
    return np.array(
        [
            [
                attend(
                    query, k[i][: position + 1, head // group], v[i][: position + 1, head // group], config.attentions[0].scale
                )
                for head, query in enumerate(next(rows))
            ]
            for i, (length, new) in enumerate(zip(lengths, new_tokens, strict=True))
            for position in range(length - new, length)
        ]
    )


ATTENTION = {
    "one token": ((1,), (1,), 8),
    "decode over several blocks": ((29,), (1,), 8),
    "a full block": ((16,), (1,), 8),
    "prefill": ((19,), (19,), 8),
    "a later chunk": ((30,), (7,), 8),
    "ragged decode": ((3, 29, 1), (1, 1, 1), 8),
    "ragged prefill, one of them continued": ((12, 1, 21), (12, 1, 4), 8),
    "the product's block size": ((300, 128), (2, 1), 128),
}


@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.parametrize("name", CONFIGS)
def test_paged_attention(name, case):
    config, (lengths, new_tokens, block_size) = CONFIGS[name], ATTENTION[case]
    cache, batch, q, k, v = attention_case(config, lengths, new_tokens, block_size)
    ours = reference.paged_attention(q, cache, 1, batch, config.attentions[0].scale)
    close(ours, expected_attention(oracles.attend, config, lengths, new_tokens, q, k, v))


@pytest.mark.parametrize(
    "case", ["one token", "decode over several blocks", "prefill", "ragged prefill, one of them continued"]
)
def test_paged_attention_of_bf16_queries_rounds_probabilities_block_by_block(case):
    config, (lengths, new_tokens, block_size) = SMALL, ATTENTION[case]
    cache, batch, q, k, v = attention_case(config, lengths, new_tokens, block_size)
    q = q.bfloat16()
    ours = reference.paged_attention(q, cache, 1, batch, config.attentions[0].scale).double().numpy()

    def rounded(*args):
        return oracles.attend_rounded(*args, block_size)

    expected = expected_attention(rounded, config, lengths, new_tokens, q, k, v)
    # A probability or a result beside a rounding point may fall the other way: few do.
    assert (ours != expected).mean() <= 0.005
    np.testing.assert_allclose(ours, expected, rtol=2**-7, atol=2**-9)
    plain = oracles.bf16(expected_attention(oracles.attend, config, lengths, new_tokens, q, k, v))
    if max(lengths) > 1:
        assert (ours != plain).mean() > 0.05  # the rounding of probabilities is visible, so it is really tested


def test_store_kv_puts_each_token_at_its_slot():
    cache = new_cache(SMALL, "fp32", num_blocks=3, block_size=4)
    k, v = normal(3, 2, 128, seed=1), normal(3, 2, 128, seed=2)
    reference.store_kv(k, v, cache, 1, at_slots([11, 0, 6]))
    for token, (block, offset) in enumerate([(2, 3), (0, 0), (1, 2)]):
        assert torch.equal(cache.k_fields(1)["data"][block, :, offset], k[token])
        assert torch.equal(cache.v_fields(1)["data"][block, :, offset], v[token])
    assert sum(int((tensor != 0).sum()) for layer in (0, 2) for tensor in cache.k_fields(layer).values()) == 0
    with pytest.raises(IndexError, match="0 … 11"):
        reference.store_kv(k, v, cache, 1, at_slots([0, 1, 12]))


def test_the_oracles_bf16_is_torchs():
    x = torch.cat([normal(2000), normal(2000, seed=1) * 1e-3, torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, 3e38, 1e-40])])
    np.testing.assert_array_equal(oracles.bf16(x.numpy()), x.bfloat16().double().numpy())
