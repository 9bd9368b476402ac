"""How many tokens a step are drafted, by a clock that the tests turn: what trials cost, and which drafts stay."""

import itertools
import random
from collections import deque

import pytest

from haarkv.engine.drafts import AHEAD, GAPS, PLAIN, SHARE, Experience, Pace


def simulate(steps, cost, share, *, slow=lambda draw, counts, count: 1, experience=None, seed=0, backlog=0):
    """A run of a number of tokens: `cost(n)` seconds a step with n drafts, 1 without; `share(tokens, i)` takes the i-th.

    Returns:
        the time over that without drafts, what was drafted in each step, and the pace.
    """
    draw, pace = random.Random(seed), Pace(4, experience or Experience())
    seconds, came, counts = 0.0, 0, []
    while came < steps:
        limit = pace.tokens(steps - came, backlog)
        count = min(limit, steps - came - 1)
        num_accepted = next((i for i in range(count) if draw.random() >= share(came, i)), count)
        reading, took = backlog * 0.1 if count else 0.0, cost(count) * slow(draw, counts, count)
        pace.took(took, limit, [(count, num_accepted)], reading, backlog if count else 0)
        seconds, came = seconds + took + reading, came + 1 + num_accepted
        counts.append(count)
    return seconds / steps, counts, pace


def always(value):
    return lambda *_: value


def dear(count):
    return 1 + 0.5 * count


def cheap(count):
    return 1 + 0.15 * count


@pytest.mark.parametrize("steps", [16, 64, 128, 1000])
@pytest.mark.parametrize("cost", [dear, cheap])
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_draft_that_does_not_pay_costs_two_percent_at_most(steps, cost, share):
    for seed in range(20):
        ratio, counts, pace = simulate(steps, cost, always(share), seed=seed)
        assert ratio <= 1 + SHARE + 1e-9
        assert pace.ledger == pytest.approx(steps - ratio * steps)
        assert pace.spent == pytest.approx(ratio * steps)
    if steps == 1000:
        assert any(counts)
        assert pace.describe().startswith("turned itself off: does not pay here, trials took 0.")


def test_a_text_that_ends_early_loses_what_was_allowed_ahead_at_most():
    """A run of 1,000 tokens that ends after any number of them."""
    _, counts, _ = simulate(1000, dear, always(0.0))
    losses = list(itertools.accumulate(dear(count) - 1 for count in counts))
    assert all(loss <= SHARE * (came + 1 + AHEAD) for came, loss in enumerate(losses))
    assert max(losses) > 0


def test_what_costs_more_than_was_earned_waits():
    """A trial may lose 2 steps' time: the steps so far and those ahead must be 100."""
    _, counts, _ = simulate(1000, lambda n: 1 + 2.0 * n, always(0.0), experience=Experience(costs={1: deque([3.0])}))
    assert counts.index(1) == 2 / SHARE - AHEAD


def test_a_draft_that_pays_is_used_within_a_few_steps():
    for seed in range(20):
        ratio, counts, pace = simulate(128, cheap, always(0.9), seed=seed)
        assert counts[:PLAIN] == [0] * PLAIN
        assert counts[PLAIN] == 1, "the first trial is the cheapest"
        assert max(counts[: PLAIN + 6]) == 4
        assert ratio < 0.55  # 0.39 of decoding alone is what 4 drafts a step give
        assert "4 a step by measured gain" in pace.describe()


def test_the_number_that_pays_most_is_found():
    """All where drafts are cheap and good, one where the second is hardly taken."""
    for cost, later, best in ((lambda n: 1 + 0.05 * n, 0.9, 4), (lambda n: 1 + 0.3 * n, 0.05, 1)):
        _, counts, _ = simulate(600, cost, lambda _, i, later=later: later if i else 0.85, seed=1)
        late = sorted(counts[40:])
        assert late[len(late) // 2] == best


def test_an_interruption_does_not_end_drafts_that_pay():
    """The first trial takes 40 times as long as it should, and later so does one step in ten."""

    def slow(draw, counts, count):
        return 40 if (count and not any(counts)) or draw.random() < 0.1 else 1

    for seed in range(10):
        _, counts, _ = simulate(1200, cheap, always(0.8), slow=slow, seed=seed)
        assert counts.index(1) == PLAIN
        assert sum(counts[200:]) / len(counts[200:]) > 2.5


def test_a_draft_that_comes_to_pay_is_found():
    for seed in range(10):
        _, counts, pace = simulate(2000, cheap, lambda came, _: 0.95 if came > 1100 else 0.0, seed=seed)
        late = next(step for step, count in enumerate(counts) if step > 1100 and count == 4)
        assert late <= 1100 + 2 * GAPS[1]
        assert pace.ledger > 0


def test_a_draft_that_stops_paying_is_dropped():
    for seed in range(10):
        _, counts, pace = simulate(1200, cheap, lambda came, _: 0.95 if came < 400 else 0.0, seed=seed)
        came = next(step for step in range(len(counts)) if step + sum(counts[:step]) > 400)
        assert counts[came - 40 : came].count(4) > 30
        assert sum(map(bool, counts[came + 80 :])) <= 16, "a few trials"
        assert "turned itself off" in pace.describe()


def test_what_a_run_has_shown_the_next_one_knows():
    good, bad = Experience(), Experience()
    simulate(128, cheap, always(0.9), experience=good)
    simulate(128, dear, always(0.0), experience=bad)
    assert (good.hopeful, bad.hopeful, Experience().hopeful) == (True, False, True)
    _, counts, _ = simulate(32, cheap, always(0.9), experience=good)
    assert counts[PLAIN] == 4, "at once"
    ratio, counts, pace = simulate(32, dear, always(0.0), experience=bad)
    assert not any(counts)
    assert ratio == 1
    assert "turned itself off" in pace.describe()


def test_what_was_missed_is_read_only_if_the_time_for_it_was_earned():
    experience = Experience(reading=0.1)  # seconds a token
    _, counts, pace = simulate(40, dear, always(0.0), experience=experience, backlog=20)
    assert not any(counts), "20 tokens take 2 steps' time; 50 steps have earned 1"
    assert "not tried" in pace.describe()
    ratio, counts, _ = simulate(400, dear, always(0.0), experience=experience, backlog=20)
    assert any(counts)
    assert ratio <= 1 + SHARE


def test_plain_steps_are_measured_anew_when_a_sequence_has_left_the_batch():
    pace, came = Pace(4, Experience()), []
    for step in range(20):
        count = pace.tokens(100)
        pace.took(cheap(count), count, [(count, count)] * (3 if step < 10 else 2))
        came.append(count)
    assert 0 not in came[PLAIN:11]
    assert came[11 : 11 + PLAIN] == [0] * PLAIN
    assert came[11 + PLAIN] == 4


def test_a_step_that_is_not_drafted_is_a_plain_one():
    """A text that nothing was found in: the draft is asked, and has nothing to say."""
    pace = Pace(4, Experience())
    for _ in range(50):
        pace.took(1.0, pace.tokens(100), [(0, 0)])
    assert pace.ledger == 0
    assert pace.describe() == ""
