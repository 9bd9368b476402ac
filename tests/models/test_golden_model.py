"""The published two-layer model: ragged prefill on permuted pages, then a decode step, held against its golden.

Its golden rounds the rotated vector to BF16 before choosing levels, rounds the scores, and stores norms in BF16; ours does
what the device kernel does. Those roundings are put back in one test, and explained as ties in the other.
"""

import bounds
import numpy as np
import pytest
import torch
from levels import compare_levels
from published_model import CONFIG, COSINE, HALF_ULP, MATCH, NORM, ROTATED_BF16_LAYER, run_mini_model
from small_models import rope_table

from haarkv.tq_ops import reference
from haarkv.tq_ops.formats.rotated import TurboQuant4Seed, codebook_on


@pytest.fixture(scope="module")
def run(golden, published_rotation):
    data = golden("turboquant_qwen3_14b/mini_model_prefill_decode")
    return run_mini_model(data, TurboQuant4Seed(published_rotation), published_rotation)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_logits_equal_the_golden(run, phase):
    ours, theirs = getattr(run, f"{phase}_logits"), torch.from_numpy(run.data[f"{phase}_logits"])
    assert torch.cosine_similarity(ours, theirs).min() >= COSINE


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("layer", [0, 1])
def test_levels_equal_the_golden_but_for_ties(run, side, layer):
    levels, norms = run.our_fields(side, layer)
    golden_levels, golden_norms = run.golden_fields(side, layer)
    atol = bounds.LAYER_BF16.kv_noise if layer == 0 else ROTATED_BF16_LAYER
    boundaries = codebook_on(128, levels.device).boundaries
    comparison = compare_levels(levels, golden_levels, run.rotated[side, layer], boundaries, atol, HALF_ULP)
    assert comparison.unexplained == 0
    assert comparison.match >= MATCH[layer]
    torch.testing.assert_close(norms, golden_norms, rtol=NORM[layer], atol=0)


def test_ties_do_not_explain_everything(run):
    """The check above would see a random level: few lie so near a boundary."""
    levels, _ = run.our_fields("k", 1)
    wrong = torch.where(levels < 15, levels + 1, levels - 1)
    boundaries = codebook_on(128, levels.device).boundaries
    comparison = compare_levels(levels, wrong, run.rotated["k", 1], boundaries, ROTATED_BF16_LAYER, HALF_ULP)
    assert comparison.unexplained > 0.75 * comparison.total


class RoundedSeed(TurboQuant4Seed):
    """The golden's own rounding: the rotated vector to BF16."""

    def choose(self, unit, rotation):
        y = (unit.bfloat16().float() @ rotation).bfloat16().float()
        return torch.bucketize(y, codebook_on(128, unit.device).boundaries, right=True).to(torch.uint8)


def test_with_the_goldens_own_rounding_its_first_layer_is_reproduced_to_the_bit(golden, published_rotation):
    """No level is different, tie or not."""
    data = golden("turboquant_qwen3_14b/mini_model_prefill_decode")
    run = run_mini_model(data, RoundedSeed(published_rotation), published_rotation)
    for side in ("k", "v"):
        levels, norms = run.our_fields(side, 0)
        golden_levels, golden_norms = run.golden_fields(side, 0)
        assert (levels != golden_levels).sum() <= 1  # a tie of the tie
        assert torch.equal(norms.bfloat16().float(), golden_norms)


def test_rope_equals_the_golden(golden):
    tables, rope_golden = golden("turboquant_qwen3_14b/rope_theta1e6_d128_512"), golden("turboquant_qwen3_14b/rope_apply")
    rope = rope_table(CONFIG)
    for ours, name in zip(rope.at(torch.arange(256)), ("cos", "sin"), strict=True):
        np.testing.assert_allclose(ours.numpy(), tables[name][:256, :64], atol=1e-7)
    cos, sin = rope.at(torch.from_numpy(rope_golden["positions"]))
    ours = reference.rope(torch.from_numpy(rope_golden["x"]), cos, sin)
    np.testing.assert_allclose(ours.numpy(), rope_golden["y"], atol=1e-5)
