"""Greedy text with drafts and without: equal where sums do not change with the batch, and near ties at most where they do."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch

import tq
from haarkv.engine.draft_choice import DraftSpec, Target, choose
from haarkv.engine.drafts import Pace
from haarkv.engine.loading import load
from haarkv.engine.sampling import Sampling
from haarkv.models.parallel import SINGLE_RANK
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.validation.fidelity.greedy_diff import greedy_diff

DRAFTS = [DraftSpec("ngram"), DraftSpec("tiny-draft")]
of_each_draft = pytest.mark.parametrize("spec", DRAFTS, ids=lambda spec: spec.name)


def prompts(tiny, count):
    """As many beginnings, of 16 to 112 tokens, from places all over the held-out text."""
    text = tiny.tokenizer.encode("\n".join(held_out_texts().values()))
    starts = [index * (len(text) - 200) // count for index in range(count)]
    return [text[start : start + 16 + start % 97] for start in starts]


def drafting(session, spec):
    model = Target(session.name, session.config, session.executor.name, None, "float32", SINGLE_RANK)
    return replace(session, draft=choose(spec, model)(session.executor), draft_tokens=spec.tokens)


@pytest.fixture(scope="module")
def plain():
    @cache
    def baseline(name):
        session = tq.load(name, executor="cpu")
        texts = prompts(session, 50)
        return session, texts, session.generate(texts, max_new_tokens=200, sampling=Sampling(), keep=True)

    return baseline


@pytest.mark.drafts_long
@pytest.mark.parametrize(
    ("name", "spec"),
    [*(("tiny", spec) for spec in DRAFTS), *(("tiny-hybrid", DraftSpec(name)) for name in ("mtp", "ngram"))],
    ids=lambda given: getattr(given, "name", given),
)
def test_fifty_texts_of_two_hundred_tokens_are_those_without_drafts(plain, name, spec, capsys, monkeypatch):
    session, texts, expected = plain(name)
    # A recurrent state keeps as many versions as tokens may be taken back, which a model is loaded with.
    draft_session = load(name, executor="cpu", draft=spec) if session.config.state_shapes else drafting(session, spec)
    # Most steps draft, whether it pays or not, and some pause.
    draw = random.Random(0)
    monkeypatch.setattr(Pace, "tokens", lambda self, *_: draw.choice([0, 1, 2, self._most, self._most]))
    result = draft_session.generate(texts, max_new_tokens=200, sampling=Sampling(), keep=True)
    with capsys.disabled():
        print(f"\n{result.drafting.describe()}")
    assert result.drafting.accepted > 0
    assert sum(len(c.token_ids) for c in expected.completions) > 5000
    assert [c.token_ids for c in result.completions] == [c.token_ids for c in expected.completions]
    for one, other in zip(result.stored, expected.stored, strict=True):
        assert one.length == other.length
        for key, tensor in one.tensors.items():
            # Of a recurrent state, drafts keep older versions as well, and the newest one counts.
            newest = slice(-1, None) if key.endswith((".delta", ".conv", ".seen")) else slice(None)
            assert torch.equal(tensor[newest], other.tensors[key][newest]), key


CASES = [
    ("reference", 3, 16),
    pytest.param("reference", 12, 60, marks=pytest.mark.drafts_long),
    pytest.param("onnx", 12, 60, marks=pytest.mark.drafts_long),
]


@pytest.mark.parametrize(("executor", "count", "new_tokens"), CASES)
def test_elsewhere_texts_part_at_near_ties_alone(executor, count, new_tokens):
    if executor == "onnx":
        pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    session = tq.load("tiny", executor=executor)
    texts = [session.tokenizer.decode(ids) for ids in prompts(session, count)]
    diff = greedy_diff(session, drafting(session, DraftSpec("ngram")), texts, dtype="float32", max_new_tokens=new_tokens)
    assert not diff.faulty, diff.unexplained
    assert all(row.divergence is None or row.divergence.near_tie for row in diff.prompts)
