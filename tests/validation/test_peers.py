"""KL against bytes beside others: what is counted, what is seen, and what is drawn."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from haarkv.engine.plans import plan_for
from haarkv.models.catalog import read_config
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KVShape, blocks_for
from haarkv.validation.fidelity import peers
from haarkv.validation.fidelity.evaluation import FidelityRow
from haarkv.validation.fidelity.peers import AsItComes, without_waiting
from haarkv.validation.fidelity.plot import family, peers_svg
from haarkv.validation.fidelity.setup import load_setup
from haarkv.validation.layers.parts import new_cache

CONFIG = read_config("tiny")
ROW = FidelityRow("x", 0.0, 0.0, 0.1, 0.1, 0.1, 1.0, 0.0, 9.0, 0.0, None)


class Side:
    config = CONFIG

    def __init__(self, plan):
        self.plan = plan


@pytest.mark.parametrize(
    "spec",
    [
        KVSpec("tq4"),
        KVSpec("tq4", tail=128, sink=4),
        KVSpec("k=kvarn4,v=kvarn2", tail=127, sink=128),
        KVSpec("k=kivi2,v=tq2", tail=128, sink=4),
    ],
)
def test_the_bytes_are_those_that_the_product_allocates(spec):
    plan = plan_for(spec, CONFIG)
    cache = new_cache(plan, CONFIG, blocks_for(4096), num_rows=1)
    row = peers._counted(ROW, Side(plan), 4096)
    assert row.bytes_per_token == cache.nbytes / 4096
    assert row.bits_per_value == 16 * row.bytes_per_token / plan_for(KVSpec("bf16"), CONFIG).bytes_per_token(KVShape(2, 128))


@pytest.mark.parametrize(("name", "side"), [("kvarn2", "v"), ("kivi4", "k")])
def test_groups_as_they_come_hold_what_their_format_restores(name, side):
    kv_format = formats.get(name, side)
    group = kv_format.group_tokens
    x = torch.randn(2, 2 * group, 128, generator=torch.Generator().manual_seed(0))
    whole = AsItComes(kv_format)
    restored = whole.dequantize(whole.quantize(x, 0), 0)
    for head in range(2):
        for begin in (0, group):
            tokens = x[head, begin : begin + group].bfloat16()
            expected = kv_format.dequantize(kv_format.quantize(tokens, 0), 0)
            torch.testing.assert_close(restored[head, begin : begin + group], expected, rtol=0, atol=1e-5)
    assert whole.bytes_per_vector(128) == kv_format.bytes_per_vector(128)


def test_without_a_window_no_token_stays_in_bf16():
    waiting = KVSpec("k=kivi2,v=kvarn4").plan(3)
    plan = without_waiting(waiting)
    assert waiting.keeps_tokens
    assert not plan.keeps_tokens
    assert [f.group_tokens for f in plan.formats] == [1] * len(plan.formats)
    assert plan.bytes_per_token(KVShape(2, 128)) == waiting.bytes_per_token(KVShape(2, 128))


def test_entries_are_measured_on_the_same_windows(tmp_path):
    setup = load_setup("tiny", ["bf16"], executor="reference")
    text = setup.base.tokenizer.encode("def main(argv):\n    return len(argv)\n" * 40)[:257]
    entries = [peers.Entry(kv, KVSpec(kv, None, 0), peers.OURS) for kv in ("tq8", "tq2", "kvarn2")]
    comparison = peers.Comparison("alone", 256, tuple(entries))
    rows = peers.measure(setup, text, comparison, 256, tmp_path / "run")
    assert [row.kv for row in rows] == ["tq8", "tq2", "kvarn2"]
    assert 0 < rows[0].kl_mean < rows[1].kl_mean / 20
    assert rows[2].bits_per_value == 2.375
    # A second run finds them, and needs no model.
    without = replace(setup, model=SimpleNamespace(dtype=setup.model.dtype))
    assert peers.measure(without, text, comparison, 256, tmp_path / "run") == rows


def test_rows_of_an_evaluation_are_taken_over(tmp_path):
    given = {"model": "tiny", "tokens": 2048, "window": 1024, "rows": [asdict(replace(ROW, kv="plan3"))]}
    file, out = tmp_path / "rows.json", tmp_path / "out.jsonl"
    file.write_text(json.dumps(given))
    for _ in range(2):  # the later row of a label counts
        peers.main(["--tokens", "2048", "--rows", str(file), "--out", str(out)])
    (row,) = peers.recorded(out)["alone"]
    assert (row["kv"], row["whose"], row["kl_mean"], row["tokens"]) == ("lr plan3", "ours", 0.1, 2048)
    for wrong in ({"tokens": 1024}, {"window": 512}, {"model": "random:14b"}):
        file.write_text(json.dumps(given | wrong))
        with pytest.raises(InputError, match="is not of 2,048 tokens of tiny"):
            peers.evaluated(file, 2048)
    file.write_text("{}")
    with pytest.raises(InputError, match="holds no rows"):
        peers.evaluated(file, 2048)


def row_of(label, bits, kl, whose="ours"):
    return {"kv": label, "bits_per_value": bits, "kl_mean": kl, "whose": whose, "tokens": 1024}


def test_families():
    labels = (
        "lr 128/64",
        "tq4",
        "tq3_0",
        "tbq4_0",
        "KVarN k4v2, its own window",
        "OSCAR",
        "KIVI 2",
        "q4_0 rotated",
        "manthan3",
    )
    assert family("lr plan 2.6") == "lr plan"
    assert [family(label) for label in labels] == ["lr", "tq", "", "", "KVarN", "OSCAR", "KIVI", "", ""]


def test_the_figure_names_every_row_and_is_the_same_again():
    pytest.importorskip("matplotlib")
    rows = {
        "alone": [row_of("tq2", 2.125, 0.05), row_of("OSCAR", 2.25, 0.1), row_of("far", 16.0, 0.1), row_of("none", 3.0, 0.0)],
        "window": [row_of("tq4", 4.9, 0.001), row_of("KVarN k4v2", 4.1, 0.002)],
    }
    drawn = peers_svg(rows)
    assert drawn == peers_svg(rows)
    assert all(f">{label}</text>" in drawn for label in ("tq2", "OSCAR", "tq4", "KVarN k4v2"))
    assert not any(f">{label}</text>" in drawn for label in ("far", "none"))
