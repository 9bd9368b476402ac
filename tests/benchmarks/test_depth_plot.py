"""The plot of drift by layer: what it takes from a report, and that it draws all of it."""

import json
import xml.etree.ElementTree as ET

import pytest

from haarkv.benchmarks.depth_plot import main, worst

ROWS = [
    {"mode": mode, "layer": layer, "hidden_cos": cosine, "k_match": 1.0, "v_match": 0.99}
    for mode, cosines in (("teacher-forced", (0.9, 0.8)), ("free-running", (0.7, 0.6)))
    for cosine in cosines
    for layer in (1, 0)
]


def test_the_worst_forward_of_each_layer_counts():
    assert worst(ROWS, "teacher-forced", "hidden_cos") == {0: 0.8, 1: 0.8}
    assert worst(ROWS, "free-running", "hidden_cos") == {0: 0.6, 1: 0.6}


def test_both_modes_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    names = {"model": "random:narrow", "candidate": "npu", "reference": "reference", "kv": "tq4", "dtype": "bfloat16"}
    (tmp_path / "report.json").write_text(json.dumps({**names, "rows": ROWS}), encoding="utf-8")
    main([str(tmp_path / "report.json"), str(tmp_path / "drift.svg")])
    drawn = ET.fromstring((tmp_path / "drift.svg").read_text(encoding="utf-8"))
    text = " ".join(drawn.itertext())
    assert "random:narrow: npu against reference, tq4, bfloat16" in text
    for label in ("teacher-forced", "free-running", "K, teacher-forced", "V, free-running"):
        assert label in text
