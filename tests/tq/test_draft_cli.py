"""`--draft` on the commands: what the cost line and `--json` say, and what is refused."""

from dataclasses import replace

import pytest

from haarkv.engine.drafts import Pace
from haarkv.engine.result import DraftReport

GENERATE = ["generate", "--executor", "cpu", "--prompt", "def main(", "--max-new-tokens", "40", "--threads", "1"]


@pytest.fixture(autouse=True)
def every_step(monkeypatch):
    """Drafts as many as may be, whatever the clock says."""
    monkeypatch.setattr(Pace, "tokens", lambda self, *_: self._most)


# 3 of 4 drafted tokens taken; whether that paid is a matter of the clock, whose numbers are given here.
REPORT = DraftReport("ngram", 3, 4, 3, 1.5, 2.0, 5.0, executor="cpu", same_text=True, kv_bytes=0)
ACCEPTANCE = "ngram, up to 3: 3 of 4 accepted (75%), 1.50 tokens a step"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, f"{ACCEPTANCE}; 2.00 ms a token, 5.00 in steps without a draft (2.50x)"),
        ({"plain_ms_per_token": 1.0, "pace": "turned itself off: does not pay here"},
         f"{ACCEPTANCE}; turned itself off: does not pay here; 2.00 ms a token, 1.00 in steps without a draft (0.50x)"),
        ({"plain_ms_per_token": None, "kv_bytes": 1200},
         f"{ACCEPTANCE}; 1,200 bytes of KV cache of its own"),
        ({"proposed": 0, "accepted": 0}, "ngram: nothing drafted"),
    ],
)  # fmt: skip
def test_the_cost_line_says_what_was_accepted_and_whether_it_paid(changes, line):
    assert replace(REPORT, **changes).describe() == line


def test_the_cost_table_has_a_line_for_the_draft(run):
    ran = run(*GENERATE, "--draft", "ngram", "--draft-tokens", "3")
    assert any(line.split()[:5] == ["draft", "ngram,", "up", "to", "3:"] for line in ran.notes().splitlines()), ran.err
    assert run(*GENERATE).out == ran.out


def test_json_has_all_of_it(run):
    draft = run(*GENERATE, "--json", "--draft", "tiny", "--draft-kv", "tq3").json["draft"]
    assert (draft["name"], draft["most"], draft["executor"], draft["same_text"]) == ("tiny", 4, "cpu", True)
    assert draft["acceptance"] == draft["accepted"] / draft["proposed"] > 0.3
    assert 1 < draft["tokens_per_step"] <= 5
    assert draft["pace"]
    assert draft["kv_bytes"] > 0


def test_an_executor_whose_sums_change_says_so(run):
    err = run(*GENERATE, "--executor", "reference", "--max-new-tokens", 8, "--draft", "ngram").notes()
    assert "sums on reference change with the batch: where two tokens nearly tie, either may come" in " ".join(err.split())
