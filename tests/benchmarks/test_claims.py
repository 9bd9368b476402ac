"""The page of published claims says what the command computes."""

import re
from functools import cache

import pytest
import torch
from places import ROOT

from haarkv.benchmarks import claims, quantizers

PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")


@cache
def computed():
    return {claim.name: claim for claim in claims.claims()}


def test_the_page_has_every_claim_with_its_verdict_and_no_other():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| (confirmed|refuted|not reproducible) \|$", PAGE, re.MULTILINE)
    assert dict(rows) == {name: claim.verdict for name, claim in computed().items()}
    assert len(rows) == len(computed())


def test_the_page_has_every_figure_to_four_digits():
    words = set(re.findall(r"[0-9]+(?:\.[0-9]+)?", PAGE.replace(",", "")))
    missing = [
        f"{claim.name}: {what} {claims.shown(value)}"
        for claim in computed().values()
        for what, value in claim.figures.items()
        if not any(number in words for number in (claims.shown(value), f"{float(claims.shown(value)):g}"))
    ]
    assert not missing


@pytest.mark.parametrize(("levels", "best"), [(2, 0.3634), (4, 0.1188), (8, 0.03744), (16, 0.01154)])
def test_the_best_uniform_quantizer_has_the_known_error(levels, best):
    """Max 1960, table II."""
    assert quantizers.best_uniform(levels) == pytest.approx(best, rel=1e-3)


def test_the_error_of_a_quantizer_is_that_of_samples():
    x, levels = (
        torch.randn(200_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
        quantizers.uniform(8, 2.0),
    )
    nearest = levels[(x.unsqueeze(1) - levels).abs().argmin(1)]
    assert quantizers.distortion(levels) == pytest.approx(float(((x - nearest) ** 2).mean()), rel=0.01)


def test_verdicts_follow_from_figures(monkeypatch):
    """Other bytes, other verdicts: nothing here is decided by hand."""
    four_times = claims.formats.get("tq4").bytes_per_vector
    monkeypatch.setattr(type(claims.formats.get("tq4_seed")), "bytes_per_vector", lambda self, d: min(64.0, four_times(d)))
    assert {c.name: c.verdict for c in claims.sizes()}["4x smaller"] == "confirmed"
