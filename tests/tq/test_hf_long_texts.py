"""`tq.TQCache` with learned keys in texts of several stretches of 1,024 positions, against the reference's own cache."""

import copy
from functools import cache

import torch
from hf_models import COMMON, build_model
from small_models import new_cache, new_paging
from transformers import LlamaConfig

import tq
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.catalog import load_model
from haarkv.tq_ops.formats.stretches import STRETCH
from haarkv.tq_ops.formats.synthetic import calibration
from haarkv.tq_ops.kv.calibration_file import CalibrationFile
from haarkv.tq_ops.kv.plan import KVSpec
from tq.hf.attention import packed_attention
from tq.hf.config import model_shape

KV, TOKENS = "k=lr4,v=tq4", 1330
LLAMA = LlamaConfig(**{**COMMON, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
                       "max_position_embeddings": 4096, "rope_theta": 1e4})  # fmt: skip


@cache
def llama():
    return build_model(LLAMA)


@cache
def synthetic():
    return calibration(2, 1, 64)


def new(**options):
    file = CalibrationFile(synthetic(), model_shape(LLAMA), "", {})
    return tq.TQCache(LLAMA, kv=KV, calibration=file, **options)


def ids(rows, count, seed=0):
    return torch.randint(2, 61, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def fed(cache, tokens):
    """Logits [B, n, vocab] of tokens that follow what a cache holds."""
    return llama()(input_ids=tokens, past_key_values=cache, use_cache=True).logits


def assert_near(ours, theirs):
    """Logits are alike but behind the few levels that rounding moved over a boundary."""
    error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert error.median() < 2e-3
    assert error.quantile(0.9) < 0.02


def test_logits_are_the_references(tmp_path):
    """A prompt in chunks, of which one begins in the first stretch and ends in the second, and steps that read it packed."""
    llama().save_pretrained(tmp_path)
    reference = ReferenceExecutor(load_model(str(tmp_path)))
    pages = new_cache(reference.config, KVSpec(KV, calibration=synthetic()), num_blocks=12, block_size=128)
    paging = new_paging(pages)
    sequence, [tokens] = paging.add(), ids(1, TOKENS + 6)
    counts = [700, 500, TOKENS - 1200, *[1] * 6]
    expected = torch.cat([
        reference.head(reference.forward(part, paging.batch([sequence], [len(part)]), pages)) for part in tokens.split(counts)
    ])  # fmt: skip
    cache = new()
    with packed_attention(llama()):
        actual = torch.cat([fed(cache, part[None])[0] for part in tokens.split(counts)])
    assert_near(actual, expected)
    assert_near(actual[STRETCH:], expected[STRETCH:])


def test_tokens_kept_beside_packed_ones_are_met_by_the_query_as_it_is():
    """Steps that read the cache packed are those that restore it."""
    restored_cache = new(tail=40, sink=4)
    fed(restored_cache, ids(1, TOKENS))
    packed = copy.deepcopy(restored_cache)
    for step in ids(1, 6, 1).split(1, dim=1):
        expected = fed(restored_cache, step)
        with packed_attention(llama()):
            actual = fed(packed, step)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0.01)


def test_padding_on_the_left_costs_nothing():
    """Stretches begin where the row begins, padding included: another offset, the same loss."""
    plain, padding = ids(1, TOKENS, 2), 300
    padded = torch.cat([torch.zeros(1, padding, dtype=torch.long), plain], dim=1)
    mask = (torch.arange(padding + TOKENS) >= padding).long()[None]

    @torch.no_grad()
    def logits(cache, **inputs):
        return llama()(past_key_values=cache, use_cache=True, **inputs).logits[:, -TOKENS:]

    exact = logits(tq.TQCache(LLAMA, kv="fp32"), input_ids=plain)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    errors = [
        float((values - exact).norm() / exact.norm())
        for values in (
            logits(new(), input_ids=plain),
            logits(new(), input_ids=padded, attention_mask=mask, position_ids=places),
        )
    ]
    assert errors[1] < 1.2 * errors[0] + 0.01


def test_coordinates_learned_of_long_windows_serve_late_positions_as_early_ones():
    windows = [ids(1, TOKENS, seed)[0].tolist() for seed in range(4, 7)]
    file = tq.calibrate(llama(), windows)
    assert file.calibration.context is None
    expected = 1e4 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    for basis in file.calibration.k:
        torch.testing.assert_close(basis.inv_freq, expected, rtol=1e-5, atol=0)
    unseen = ids(1, 2600, 9)
    exact = fed(tq.TQCache(LLAMA, kv="fp32"), unseen)

    def losses(kv):
        error = (fed(tq.TQCache(LLAMA, kv=kv, calibration=file), unseen) - exact).square().mean(-1)[0]
        return [float(part.mean()) for part in (error[200:STRETCH], error[STRETCH : 2 * STRETCH], error[2 * STRETCH :])]

    early, *later = losses("k=lr4,v=tq8")
    assert all(late < 1.5 * early for late in later)
