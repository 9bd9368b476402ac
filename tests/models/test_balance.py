"""Balance: the same model bit for bit, channels that a rotation can take, and nothing where weights are even."""

from dataclasses import replace

import pytest
import torch
from planted import dead_head, key_biases, outlier_channels, run, save_tiny, tiny, token_ids
from small_models import CONFIGS, resize_config, small_model

from haarkv.codebooks.balance import channel_scales, error_ratio
from haarkv.models.balance import balance, checkpoint_moments, key_moments, value_moments
from haarkv.models.catalog import load_model
from haarkv.tq_ops import formats

GAUSSIAN = torch.Generator().manual_seed(5)


def changed_fields(model, other):
    pairs = zip(model.weights.layers, other.weights.layers, strict=True)
    return {
        name
        for a, b in pairs
        for (name, _, x), (_, _, y) in zip(a.named_tensors(), b.named_tensors(), strict=True)
        if not torch.equal(x, y)
    }


class TestScales:
    def test_are_powers_of_two_near_the_best(self):
        use, size = (torch.rand(4, 64, generator=GAUSSIAN) * 100 for _ in range(2))
        scales = channel_scales(use, size)
        assert torch.equal(scales.log2(), scales.log2().round())
        best = error_ratio(use, size, (use / size) ** 0.25)
        ratio = error_ratio(use, size, scales)
        assert (ratio <= best).all()
        # Rounding an exponent costs (sinh(ln 2) / ln 2)**2 = 1.17 where exponents lie anywhere between two whole numbers.
        assert (ratio > 0.83 * best).all()

    @pytest.mark.parametrize(("use", "size"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1e-30, 1e30)])
    def test_of_channels_that_are_never_seen_or_always_0(self, use, size):
        """In the second head all are 0, which then stays as it is."""
        uses, sizes = torch.ones(2, 32), torch.ones(2, 32)
        uses[0, 0], sizes[0, 0], sizes[1] = use, size, 0.0
        scales = channel_scales(uses, sizes)
        ratio = error_ratio(uses, sizes, scales)
        assert 0 < scales[0, 0] < torch.inf
        assert (scales[:, 1:] == 1).all()
        assert torch.isfinite(ratio).all()
        assert scales[1, 0] == ratio[1] == 1

    def test_the_ratio_is_what_quantizing_shows(self):
        size = torch.ones(1, 128)
        size[0, :2] = 900.0
        use = 1 / size
        scales = channel_scales(use, size)
        x, f = torch.randn(1, 2048, 128, generator=GAUSSIAN) * size.sqrt().unsqueeze(1), formats.get("tq4")

        def error(factors):
            x_hat = f.dequantize(f.quantize(x * factors, 0), 0) / factors
            return float(((x_hat - x).square() * use.unsqueeze(1)).sum())

        measured_ratio = error(torch.ones(128)) / error(scales)
        assert measured_ratio == pytest.approx(float(error_ratio(use, size, scales)), rel=0.15)


class TestModel:
    @pytest.mark.parametrize("factor", [1.5, 3, 30, 100])
    def test_a_planted_model_becomes_even_again(self, factor):
        """From a tenth of the error on, the least that counts; an even model stays the very same."""
        model = outlier_channels(factor)
        balanced, scaling = balance(model)
        uneven = {(layer, side) for layer in range(6) for side in "KV"} if factor > 1.5 else set()
        assert {(entry.layer, entry.side) for entry in scaling.uneven} == uneven
        assert (balanced is model) == (not uneven)
        assert balance(balanced)[1].uneven == ()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("name", ["norms", "biases"])
    def test_it_computes_the_same_bits(self, name, dtype):
        base = outlier_channels(30) if name == "norms" else key_biases(50, (1, 4))
        weights = replace(
            base.weights, layers=tuple(x.map(lambda _, t: t.to(dtype)) for x in base.weights.layers),
            embedding=base.weights.embedding.to(dtype), lm_head=base.weights.lm_head.to(dtype),
        )  # fmt: skip
        model = replace(base, weights=weights)
        balanced, scaling = balance(model)
        assert scaling.uneven
        expected = {"k_norm", "q_norm", "v_proj", "o_proj"} if name == "norms" else {"k_proj", "k_bias", "q_proj"}
        assert changed_fields(model, balanced) == expected
        ids = token_ids(64)
        assert torch.equal(run(balanced, ids), run(model, ids))

    def test_channels_that_rope_leaves_are_scaled_by_themselves(self):
        """RoPE turns 32 of the 128 channels of a head, channel i with i + 16."""
        model = load_model("tiny-hybrid")
        uneven = torch.ones(128)
        uneven[[0, 100]] = 16.0
        layers = tuple(layer.map(lambda field, x: x * uneven if field == "k_norm" else x) for layer in model.weights.layers)
        planted_one = replace(model, weights=replace(model.weights, layers=layers))
        balanced, scaling = balance(planted_one)
        assert {entry.side for entry in scaling.uneven} == {"K"}
        ids = list(range(40, 104))
        assert torch.equal(run(balanced, ids, kv="fp32"), run(planted_one, ids, kv="fp32"))

    def test_heads_are_scaled_each_by_itself(self):
        # Grouped heads of a model without norms: a planted head's scales must reach its own queries and no others.
        config = resize_config(CONFIGS["gqa5_d128"], model_type="llama")
        model = small_model(config)
        outlier = torch.ones(config.heads.num_kv_heads, config.heads.head_dim)
        outlier[1, [5, 69]] = 64.0
        query_outlier = outlier.repeat_interleave(5, dim=0).flatten()

        def plant(field, x):
            rows = {"k_proj": outlier.flatten(), "v_proj": outlier.flatten(), "q_proj": 1 / query_outlier}.get(field)
            return x / query_outlier if field == "o_proj" else x if rows is None else x * rows[:, None]

        layers = tuple(layer.map(plant) for layer in model.weights.layers)
        uneven = replace(model, weights=replace(model.weights, layers=layers))
        balanced, scaling = balance(uneven)
        assert len(scaling.uneven) == 2 * config.num_layers
        ids = list(range(40))
        assert torch.equal(run(balanced, ids, kv="fp32"), run(uneven, ids, kv="fp32"))

    def test_a_dead_head_changes_nothing_for_the_others(self):
        balanced, _ = balance(dead_head(outlier_channels(30)))
        assert all(torch.isfinite(x).all() for layer in balanced.weights.layers for _, _, x in layer.named_tensors())
        whole, _ = balance(outlier_channels(30))
        dim = tiny().config.heads.head_dim
        for ours, theirs in zip(balanced.weights.layers, whole.weights.layers, strict=True):
            assert torch.equal(ours["v_proj"][dim:], theirs["v_proj"][dim:])


def test_what_is_wanted_is_scaled():
    model = outlier_channels(30)
    balanced, scaling = balance(model, lambda layer, side: side == "V" and layer not in (1, 2))
    assert changed_fields(model, balanced) == {"v_proj", "o_proj"}
    assert {(entry.layer, entry.side) for entry in scaling.uneven} == {(layer, "V") for layer in (0, 3, 4, 5)}


@pytest.mark.parametrize("name", ["norms", "biases"])
def test_a_checkpoint_says_the_same_as_the_model_that_was_loaded_from_it(tmp_path, name):
    model = outlier_channels(30) if name == "norms" else key_biases(100, (1,))
    folder = save_tiny(model, tmp_path / "m")
    file_moments, config = checkpoint_moments(folder), model.config
    assert len(file_moments) == config.num_layers
    for layer, pair in file_moments.items():
        tensors = model.weights.layers[layer]
        for found_moments, moments in zip(pair, (key_moments, value_moments), strict=True):
            expected = moments(tensors, config.heads.num_kv_heads, config.heads.head_dim)
            assert torch.allclose(found_moments.use, expected.use, rtol=0.02)
            assert torch.allclose(found_moments.size, expected.size, rtol=0.02)
            assert torch.allclose(found_moments.constant, expected.constant, rtol=0.02)
    assert checkpoint_moments("random:0.6b") == {}
