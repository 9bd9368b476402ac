"""Fidelity of KV caches, held against plain forwards and numpy; windows, and going on after a stop."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from checkpoints import FINAL_NORM, write_checkpoint

from haarkv.executors.base import prefill
from haarkv.tq_ops.errors import InputError, NonFiniteError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.fidelity import evaluation
from haarkv.validation.fidelity import scores as fidelity
from haarkv.validation.fidelity.evaluation import evaluate, make_workload
from haarkv.validation.fidelity.scores import Partial, score_text
from haarkv.validation.fidelity.setup import cache_fingerprint, load_setup, run_fingerprint

TEXT = "for spam in eggs:\n    print(spam, 'and', eggs)\n\nclass Knight:\n    says = 'Ni!'\n"
# FP32 sums in another order change logits of size 1 by a few 1e-6: relative, of figures that quantization makes.
REORDER_TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("eval") / "checkpoint")


@pytest.fixture(scope="module")
def setup(checkpoint):
    return load_setup(str(checkpoint), ["bf16", "tq2", "k=tq2,v=bf16", "k=bf16,v=tq2"])


def workload_of_text(text=TEXT, **kwargs):
    return make_workload(list(text.encode()), 1024, **{"window": 30, **kwargs})


# -- An evaluation written down apart: whole prefixes, one after the other, and numpy --------------------------------------


def plain_logits(side, tokens):
    """After each token of a window: a prefill of everything up to it, in a cache of its own, in one piece."""
    rows = []
    for end in range(1, len(tokens) + 1):
        cache, paging = side.new_cache(1, end)
        batch = paging.batch([paging.add()], [end])
        rows.append(prefill(side.executor, torch.tensor(tokens[:end]), batch, cache)[0].double().numpy())
    return np.stack(rows)


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def plain_probabilities(side, text, window):
    """[N, vocab] float64 of every window, and the tokens [N] that really follow."""
    ids = list(text.encode())
    pieces = [(ids[i : i + window], ids[i + 1 : i + window + 1]) for i in range(0, len(ids) - 1, window)]
    logits = [plain_logits(side, fed[: len(targets)]) for fed, targets in pieces]
    return softmax(np.concatenate(logits)), np.concatenate([targets for _, targets in pieces])


def plain_figures(a, b, targets):
    kl = np.sort((a * np.log(a / b)).sum(-1))
    at = np.arange(len(targets)), targets
    return {
        "kl_mean": kl.mean(),
        "kl_median": np.median(kl),
        "kl_p999": kl[-1],
        "top1": (a.argmax(-1) == b.argmax(-1)).mean(),
        "rms_dp": np.sqrt(np.mean((b[at] - a[at]) ** 2)),
        "ppl": 1 / np.prod(b[at] ** (1 / len(targets))),
    }


def test_every_figure_equals_plain_forwards_and_numpy(setup, monkeypatch):
    monkeypatch.setattr(evaluation, "CHUNK", 7)
    monkeypatch.setattr(fidelity, "_SLICE", 3 * 257)
    text = TEXT[:52]
    plan = workload_of_text(text, window=20)
    base_probabilities, targets = plain_probabilities(setup.base, text, 20)
    assert plan.scored_tokens == len(targets) == 51
    rows = list(evaluate(setup, plan))
    assert rows[0].kv == "bf16"
    for row in rows:
        assert row.ppl_delta == pytest.approx(row.ppl - rows[0].ppl, abs=1e-9)
        expected = plain_figures(base_probabilities, plain_probabilities(setup.caches[row.kv], text, 20)[0], targets)
        actual = asdict(row)
        if row.kv != "bf16":
            assert expected["kl_mean"] > 1e-3
            assert expected["top1"] < 1
        for name, value in expected.items():
            assert actual[name] == pytest.approx(value, rel=REORDER_TOLERANCE, abs=1e-12), (row.kv, name)


def test_bf16_against_itself_is_exactly_zero(setup):
    """As the baseline itself, and run a second time."""
    again = replace(setup, caches={"bf16": setup.base, "again": replace(setup.base)})
    assert again.caches["again"] is not setup.base
    for row in evaluate(again, workload_of_text()):
        assert (row.kl_mean, row.kl_median, row.kl_p999, row.rms_dp, row.ppl_delta) == (0, 0, 0, 0, 0)
        assert (row.top1, row.bits_per_value) == (1, 16)


@pytest.mark.parametrize("side", ["a", "b"])
def test_logits_that_are_not_finite_are_refused(side):
    logits = {"a": torch.zeros(5, 3), "b": torch.zeros(5, 3)}
    logits[side][4, 1] = torch.nan
    with pytest.raises(NonFiniteError, match=f"side {side.upper()}"):
        score_text(**logits, targets=torch.zeros(5, dtype=torch.int64))


# -- What is measured: stored K and V, from an empty cache ------------------------------------------------------------------


def all_scores(setup, plan):
    partial_scores = Partial()
    evaluate(setup, plan, partial=partial_scores)
    return {name: [partial_scores.scores(name, n) for n in range(len(plan.windows))] for name in setup.caches}


def test_a_token_reads_its_own_stored_v_and_windows_begin_empty(setup):
    scores = all_scores(setup, workload_of_text())
    for window in range(3):
        # It attends to itself alone: with weight 1 whatever K is, and to V as it is stored.
        assert scores["tq2"][window].kl[0] > 1e-4
        assert scores["k=bf16,v=tq2"][window].kl[0] > 1e-4
        assert scores["k=tq2,v=bf16"][window].kl[0] == 0
        assert scores["k=tq2,v=bf16"][window].kl[1:].min() > 0
    alone = all_scores(setup, workload_of_text(TEXT[30:]))
    for name in setup.caches:
        assert torch.equal(alone[name][0].kl, scores[name][1].kl)


@pytest.mark.parametrize("kv", ["tq4", "k=q8_0,v=tq2", "fp32"])
def test_bytes_are_those_of_the_cache(checkpoint, kv):
    setup = load_setup(str(checkpoint), [kv])
    (row,) = evaluate(setup, workload_of_text(tokens=1))
    cache, _ = setup.caches[kv].new_cache(1, 128)
    assert row.kv == kv
    assert row.bytes_per_token == cache.nbytes / cache.kv[0].num_slots
    assert row.bits_per_value == 8 * cache.nbytes / cache.kv[0].num_slots / (2 * 2 * 2 * 32)


# -- Windows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 30, 31, 32, 95])
@pytest.mark.parametrize("window", [1, 7, 30, 500])
def test_each_token_but_the_first_is_scored_once(length, window):
    plan = make_workload(range(length), 1024, window=window)
    positions = [place + 1 for fed in plan.windows for place in fed]
    assert positions == list(range(1, length))
    assert max(map(len, plan.windows)) <= window


def test_a_limit_is_kept_and_spread():
    plan = make_workload(range(1001), 1024, window=100, tokens=250)
    assert plan.windows == [range(100), range(300, 400), range(600, 650)]
    assert plan.scored_tokens == 250
    assert make_workload(range(1001), 1024, window=100, tokens=5000).scored_tokens == 1000
    assert make_workload(range(95), 1024, window=10, tokens=93).scored_tokens == 93


def test_defaults_fit_the_model():
    assert len(make_workload(range(5000), 4096).windows[0]) == 1024
    assert len(make_workload(range(5000), 64).windows[0]) == 64


# -- Going on where another run stopped -------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def run_with_saves(setup, plan, path, stop_after=None):
    """Rows (None if stopped), and which steps were run or found; `path` is where they are saved."""
    steps = []

    def on_step(what, tokens):
        steps.append(what)
        if len(steps) == stop_after:
            raise Stop

    fingerprints = {name: cache_fingerprint(side) for name, side in setup.caches.items()}
    partial = Partial(path, run_fingerprint(setup, plan), fingerprints)
    try:
        rows = evaluate(setup, plan, partial=partial, on_step=on_step)
    except Stop:
        rows = None
    return rows, steps


@pytest.mark.parametrize("stop_after", [1, 6, 11])
def test_an_interrupted_run_goes_on_to_the_very_same_rows(setup, stop_after, monkeypatch, tmp_path):
    plan = workload_of_text()
    whole = evaluate(setup, plan)
    assert run_with_saves(setup, plan, tmp_path / "run", stop_after)[0] is None
    run = []
    right = evaluation.score_window
    monkeypatch.setattr(evaluation, "score_window", lambda *args: run.append(args[0]) or right(*args))
    rows, steps = run_with_saves(setup, plan, tmp_path / "run")
    assert rows == whole
    assert len(run) == 3 * 4 - stop_after
    assert len(steps) == 3 * 4
    monkeypatch.setattr(evaluation, "run_span", None)  # nothing is left to run
    assert run_with_saves(setup, plan, tmp_path / "run")[0] == whole


def test_a_finished_file_takes_more_formats(setup, checkpoint, monkeypatch, tmp_path):
    plan = workload_of_text()
    run_with_saves(setup, plan, tmp_path / "run")
    more = load_setup(str(checkpoint), ["tq2", "tq4"])
    run = []
    right = evaluation.score_window
    monkeypatch.setattr(evaluation, "score_window", lambda *args: run.append(args[0]) or right(*args))
    rows, _ = run_with_saves(more, plan, tmp_path / "run")
    assert run == ["tq4"] * 3
    assert rows == evaluate(more, plan)


def test_what_belongs_to_another_run_is_refused(setup, checkpoint, tmp_path):
    plan = workload_of_text()
    run_with_saves(setup, plan, tmp_path / "run")
    other_model = load_setup(str(write_checkpoint(tmp_path / "m", mutate=lambda t: t[FINAL_NORM].mul_(2))), ["tq2"])
    for other, other_plan, word in (
        (other_model, plan, "model"),
        (setup, workload_of_text(TEXT.upper()), "text"),
        (setup, workload_of_text(window=20), "windows"),
        (load_setup(str(checkpoint), ["tq2"], dtype="bfloat16"), plan, "dtype"),
    ):
        with pytest.raises(InputError, match=f"another .*{word}"):
            run_with_saves(other, other_plan, tmp_path / "run")
    other_setup = replace(
        setup, caches={"tq2": replace(setup.base, plan=KVSpec("k=tq3,v=tq2").plan(setup.base.config.num_layers))}
    )
    with pytest.raises(InputError, match="tq2 had other code or tables"):
        run_with_saves(other_setup, plan, tmp_path / "run")
