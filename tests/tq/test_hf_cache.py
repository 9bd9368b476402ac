"""`tq.TQCache` against transformers' own caches: the same tokens and logits, the bytes held, one quantization a vector."""

import gc
import random

import pytest
import torch
from at_length import MORE, pairwise_cases, rest
from hf_models import COMMON, VOCAB, build_model, tq_layer
from transformers import AutoConfig, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import tq
from haarkv.tq_ops import formats
from haarkv.tq_ops.formats.base import Field
from tq.hf.store import BLOCK_SIZE, Store, _tokens_of_rows

PROMPT, NEW = 14, 12
CONFIGS = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "llama": {},
    "mistral": {"head_dim": 32, "sliding_window": 7},
    "phi3": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 32, "num_key_value_heads": 1},
    "falcon": {"multi_query": True},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gemma3_text": {"head_dim": 32, "sliding_window": 7, "num_hidden_layers": 6},
}
# Prompts padded on the left by 5, 2 and 0.
MASK = torch.ones(3, PROMPT, dtype=torch.long)
MASK[0, :5], MASK[1, :2] = 0, 0
PROMPTS = torch.randint(2, VOCAB, (3, PROMPT), generator=torch.Generator().manual_seed(1)) * MASK


def build(name, dtype=torch.float32, seed=0):
    return build_model(AutoConfig.for_model(name, **{**COMMON, **CONFIGS[name]}), dtype, seed)


def run(model, cache, rows=slice(None), **kwargs):
    """Token ids and every step's logits."""
    torch.manual_seed(0)
    out = model.generate(
        PROMPTS[rows], attention_mask=MASK[rows], past_key_values=cache, max_new_tokens=NEW, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True, **{"do_sample": False, **kwargs},
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


def both(model, kv, **kwargs):
    """Whether tokens and logits equal `DynamicCache`'s, bit for bit; and the tokens."""
    theirs = run(model, DynamicCache(config=model.config), **kwargs)
    ours = run(model, tq.TQCache(model.config, kv), **kwargs)
    return all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)), theirs[0]


class Doubling:
    """In place of `RopeShift`: exact, and wrong at any other position."""

    def undo(self, x, positions):
        return x * 2.0 ** (positions % 7).unsqueeze(-1)

    def redo(self, x, positions):
        return x / 2.0 ** (positions % 7).unsqueeze(-1)


class GroupFormat(formats.KVFormat):
    """Exact storage of G tokens together, and of single ones by their positions; counts the vectors that it is handed."""

    purpose, lossy = "for tests", False

    def __init__(self, group):
        self.name, self.group_tokens, self.vectors = f"grouped{group}", group, 0

    def fields(self, head_dim):
        return {"data": Field(torch.float32, (self.group_tokens, head_dim) if self.group_tokens > 1 else (head_dim,))}

    def bytes_per_vector(self, head_dim):
        return 4.0 * head_dim

    def rope_shift(self, layer):
        return Doubling() if self.group_tokens == 1 else None

    def quantize(self, x, layer):
        assert self.group_tokens == 1 or x.shape[-2] == self.group_tokens
        self.vectors += x[..., 0].numel()
        return {"data": x.float()}

    def dequantize(self, fields, layer):
        return fields["data"]


# --- the same text as DynamicCache ---


@pytest.mark.parametrize(
    ("name", "storage"), pairwise_cases(MORE, list(CONFIGS), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
)
def test_plain_storage_gives_the_logits_of_dynamic_cache(name, storage):
    """And `tq4` runs as well, and is seen by the comparison."""
    kv, dtype = storage
    model = build(name, dtype)
    equal, tokens = both(model, kv)
    assert equal
    assert len(tokens[:, PROMPT:].unique()) >= 8
    assert not both(model, "tq4")[0]


MODES = {
    "beams": {"num_beams": 3},
    "chunked": {"prefill_chunk_size": 4},
    "sampled": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3, "rows": slice(2, 3)},
    "assisted": {"rows": slice(2, 3)},
}


# The rest runs with `make test-long`.
@pytest.mark.parametrize(("name", "mode"), pairwise_cases(MORE, ["gpt2", "llama", "mistral", "gemma3_text"], list(MODES)))
def test_every_way_of_decoding(name, mode):
    assistant = {"assistant_model": build(name, seed=1)} if mode == "assisted" else {}
    assert both(build(name), "fp32", **MODES[mode], **assistant)[0]


@pytest.mark.parametrize("kv", ["tq4", "kivi2"])
def test_a_reset_cache_is_as_new(kv):
    model = build("mistral")
    cache = tq.TQCache(model.config, kv)
    first = run(model, cache, rows=slice(2, 3), prompt_lookup_num_tokens=3)  # leaves past recording switched on
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.stats().allocated == 0
    tokens, logits = run(model, cache)
    fresh = run(model, tq.TQCache(model.config, kv))
    assert torch.equal(tokens, fresh[0])
    assert torch.equal(logits, fresh[1])
    assert cache.layers[0].store.tokens == 6  # the window of 7, without the token to come
    assert first[0].shape[0] == 1


# --- the store, against transformers' layers ---


# The rest runs with `make test-long`.
@pytest.mark.parametrize(
    ("packed", "sink", "window"), pairwise_cases(MORE, [((1, 1), 0), ((1, 1), 5), ((4, 1), 3), ((4, 4), 9)], [0, 3], [None, 6])
)
def test_any_sequence_of_operations_gives_what_their_layer_gives(monkeypatch, packed, sink, window):
    """Appended, cropped, reordered, repeated and selected at random, read in pieces, in small blocks; a vector that is packed
    alone is quantized once."""
    monkeypatch.setattr("tq.hf.store.READ_TOKENS", 4)
    monkeypatch.setattr("tq.hf.store.BLOCK_SIZE", 8)
    monkeypatch.setattr("tq.hf.store.SPARE_TOKENS", 1)
    groups, tail = packed
    for seed in range(6):
        k_format, v_format = GroupFormat(groups[0]), GroupFormat(groups[1])
        ours = tq_layer(k_format, v_format, sink=sink, tail=(tail, tail), window=window)
        theirs = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
        if window is not None:
            theirs.activate_past_recording()
            ours.activate_past_recording()
        draw, rows, num_vectors = random.Random(seed), 2, 0
        generator = torch.Generator().manual_seed(seed)
        for _ in range(40):
            count = draw.choice([1, 1, 1, 2, 7, 23])
            k, v = torch.randn(2, rows, 3, count, 8, generator=generator)
            num_vectors += rows * 3 * count
            assert ours.get_mask_sizes(count) == theirs.get_mask_sizes(count)
            for mine, right in zip(ours.update(k, v), theirs.update(k, v), strict=True):
                assert torch.equal(mine, right)
            num_removed = draw.choice([0, 0, 1, min(count, 5)])
            ours.crop(-num_removed)
            theirs.crop(-num_removed)
            assert ours.get_seq_length() == theirs.get_seq_length()
            order = torch.tensor([draw.randrange(rows) for _ in range(draw.choice([rows, rows, 1, 3]))])
            for layer in (ours, theirs):
                if len(order) == rows:
                    layer.reorder_cache(order)
                elif rows == 1:
                    layer.batch_repeat_interleave(2)
                else:
                    layer.batch_select_indices(order)
            rows = 2 if rows == 1 and len(order) != rows else len(order)
        for kv_format in (k_format, v_format):
            assert kv_format.group_tokens > 1 or kv_format.vectors == num_vectors
            assert kv_format.vectors % kv_format.group_tokens == 0


# --- what is held ---


def new_bytes(before):
    """Bytes of the storages of all live tensors that were not there before, by address."""
    gc.collect()
    return {p: n for p, n in storages().items() if p not in before}


def storages():
    tensors = (t for t in gc.get_objects() if type(t) is torch.Tensor and t.untyped_storage().nbytes())
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize(
    ("kv", "tail", "sink", "window"),
    rest(
        MORE,
        [("tq4", 0, 0, 100), ("tq4", 40, 4, None), ("tq4", 40, 4, 100), ("kivi2", 31, 0, None), ("fp32", 0, 0, 100)],
        lambda index, _: index in (2, 3),
    ),
)
def test_nothing_restored_outlives_its_reader(kv, tail, sink, window):
    """The live tensors after `update` are the fields, tails and sinks, and not one more; `stats` counts these very bytes."""
    k_format, v_format = formats.get(kv, "k"), formats.get(kv, "v")
    warm = torch.randn(1, 2, 64, 128)
    tq_layer(k_format, v_format, tail=(31, 31)).update(warm, warm)  # rotation and codebook, which are shared
    gc.collect()
    before = storages()
    layer = tq_layer(k_format, v_format, sink=sink, tail=(tail, tail), window=window)
    for count in (1024, 1, 1):
        k, v = torch.randn(2, 1, 2, count, 128)
        keys, values = layer.update(k, v)
        del k, v, keys, values
    _tokens_of_rows.cache_clear()  # the last step's batch, which all layers share
    sizes = new_bytes(before)
    assert sum(sizes.values()) == sum(tensor.nbytes for tensor in layer.store.tensors())
    tokens = 1026 if window is None else window - 1
    if kv != "fp32":
        assert sum(sizes.values()) < 0.3 * tokens * 2 * 2 * 128 * 2 + (tail + sink + 40) * 2 * 2 * 128 * 4
    if window:
        assert layer.store.tokens == window - 1


@pytest.mark.parametrize("steps", [[1024], [1000] + [1] * 24])
def test_tq4_takes_a_quarter_of_bf16(steps):
    cache = tq.TQCache(AutoConfig.for_model("qwen3", **COMMON, head_dim=128), "tq4")
    for count in steps:
        k, v = torch.randn(2, 2, 2, count, 128, dtype=torch.bfloat16)
        for layer in range(2):
            keys, values = cache.update(k, v, layer)
            assert keys.dtype == values.dtype == torch.bfloat16
    stats = cache.stats()
    vectors = 2 * 2 * 2 * 2 * 1024  # layers, K and V, rows, heads, tokens
    assert (stats.used, stats.bf16) == (66 * vectors, 256 * vectors)
    assert stats.ratio == 66 / 256
    spare = 2 * 2 * 2 * 2 * 128 * 66  # a block, of each row and head on each side of each layer
    assert stats.used <= stats.allocated <= stats.used * 33 / 32 + spare
    assert [(row.layer, row.kv, row.tokens, row.used) for row in stats.layers] == [
        (layer, "tq4", 1024, 33 * vectors) for layer in range(2)
    ]


def test_memory_grows_in_linear_time(monkeypatch):
    moves, move = [], Store._move

    def counting(self, blocks):
        moves.append(self.tokens)
        move(self, blocks)

    monkeypatch.setattr(Store, "_move", counting)
    tq4, token = formats.get("tq4"), torch.zeros(1, 1, 1, 8)
    store = Store(0, (tq4, tq4), (token, token), sink=0, tails=(0, 0))
    for _ in range(8192):
        store.write(token, token)
        assert store.blocks * BLOCK_SIZE <= store.tokens * 33 // 32 + 32 + BLOCK_SIZE
    assert sum(moves) < 40 * 8192
    for _ in range(8192):  # a window that moves on
        store.write(token, token)
        store.keep_newest(8192)
    assert store.tokens == 8192
    assert sum(moves) < 40 * 2 * 8192
