"""RoPE and its scaling against transformers: frequencies, cos and sin, from both generations of `config.json`."""

import json
from dataclasses import replace

import pytest
import torch
from checkpoints import CONFIG
from small_models import rope_table
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from haarkv.models.catalog import read_config
from haarkv.models.rope import inverse_frequencies
from haarkv.tq_ops.errors import InputError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn_of_no_power_of_two": YARN | {"factor": 3.3, "original_max_position_embeddings": 1000},
    "yarn_betas": YARN | {"beta_fast": 64, "beta_slow": 2},
    "yarn_not_truncated": YARN | {"truncate": False},
    "yarn_attention_factor": YARN | {"attention_factor": 0.75},
    "yarn_mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn_one_mscale": YARN | {"mscale": 0.707},
    "yarn_trained_length_is_the_configs": {"rope_type": "yarn", "factor": 2.0},
    "yarn_factor_from_lengths": YARN | {"factor": None, "original_max_position_embeddings": 10240},
    "yarn_short": YARN | {"original_max_position_embeddings": 8},
}  # fmt: skip


def configs(tmp_path, rope, old, head_dim=128, theta=1e6, **entries):
    """The same entries as transformers and as we read them."""
    raw = CONFIG | {"head_dim": head_dim, "rope_theta": theta, "max_position_embeddings": 40960} | entries
    if old:
        raw["rope_scaling"] = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    else:
        raw.pop("rope_theta")
        raw["rope_parameters"] = rope | {"rope_theta": theta}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    return Qwen3Config.from_json_file(path), read_config(tmp_path)


@pytest.mark.parametrize("old", [True, False], ids=["transformers4", "transformers5"])
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_and_tables_equal_transformers(tmp_path, name, old, head_dim):
    theirs, ours = configs(tmp_path, SCALINGS[name], old, head_dim)
    rotary, table = Qwen3RotaryEmbedding(theirs), rope_table(ours)
    inv_freq = inverse_frequencies(ours.common.attention.rope)
    torch.testing.assert_close(inv_freq, rotary.inv_freq, rtol=4e-7, atol=0)
    positions = torch.tensor([0, 1, 2, 63, 64, 500, 40959, table.positions - 1]).sort().values
    cos, sin = (t[0, :, : head_dim // 2] for t in rotary(torch.zeros(1), positions[None]))
    # An angle is off by what its frequency is, position times: nothing more.
    slack = 2e-6 + positions[:, None] * (inv_freq - rotary.inv_freq).abs() * 2
    for mine, expected in zip(table.at(positions), (cos, sin), strict=True):
        assert ((mine - expected).abs() <= slack).all()


def test_rows_are_those_of_the_whole_table_in_any_order(tmp_path):
    """In any number, inside and outside inference mode, bit for bit."""
    config = configs(tmp_path, YARN, False)[1]
    whole = rope_table(config).whole()
    table, draw = rope_table(config), torch.Generator().manual_seed(0)
    for count, limit in ((1, 9), (1, 2000), (3, 5000), (64, 9), (700, table.positions), (0, 1)):
        positions = torch.randint(0, limit, (count,), generator=draw)
        with torch.inference_mode(count == 3):
            cos_and_sin = table.at(positions)
        assert all(torch.equal(mine, rows[positions]) for mine, rows in zip(cos_and_sin, whole, strict=True))
    for position in (0, 1023, 1024, table.positions - 1):
        assert torch.equal(table.at(torch.tensor([position]))[1], whole[1][position : position + 1])
    for wrong in (-1, table.positions):
        with pytest.raises(IndexError):
            table.at(torch.tensor([wrong]))


def test_a_table_reaches_as_far_as_it_was_asked(tmp_path):
    table = rope_table(replace(configs(tmp_path, SCALINGS["default"], False)[1], max_position_embeddings=2**31))
    table.at(torch.tensor([1500]))
    assert [len(rows) for rows in table._rows] == [2048, 2048]
    with pytest.raises(InputError, match="cos and sin of 2,147,483,648 positions"):
        table.whole()


@pytest.mark.parametrize(
    ("rope", "stated", "positions"),
    [
        (YARN, 40960, 131072),  # as Qwen3's own page says to switch YaRN on
        (YARN, 131072, 131072),
        (YARN, 200000, 200000),
        (SCALINGS["llama3"], 131072, 131072),
        (SCALINGS["linear"], 40960, 40960),
        (SCALINGS["default"], 40960, 40960),
    ],
)
def test_yarn_reaches_as_far_as_its_factor(tmp_path, rope, stated, positions):
    assert configs(tmp_path, rope, True, max_position_embeddings=stated)[1].max_position_embeddings == positions


def test_a_trained_length_beside_the_parameters_counts_first(tmp_path):
    theirs, ours = configs(tmp_path, YARN, False, original_max_position_embeddings=4096)
    torch.testing.assert_close(
        inverse_frequencies(ours.common.attention.rope), Qwen3RotaryEmbedding(theirs).inv_freq, rtol=4e-7, atol=0
    )
