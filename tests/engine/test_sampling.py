"""Sampling against transformers' own logits processors, and the seeds."""

import itertools
import json

import pytest
import torch
from checkpoints import HEAD, byte_tokenizer, saying, write_checkpoint
from samplers import Sampler

import tq
from haarkv.engine import sampling as sampling_module
from haarkv.engine.drafts import Pace
from haarkv.engine.sampling import BatchSampler, Sampling
from haarkv.tq_ops.errors import InputError

VOCABULARY = 211


def seeded_logits(seed):
    return 3 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))


def theirs(sampling, logits, prompt_ids):
    """The distribution that transformers draws from, its processors in the order of `GenerationMixin`."""
    from transformers.generation import logits_process as hf

    processors = [
        # In fp32, as the logits are.
        lambda ids, scores: hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores).double(),
        hf.TemperatureLogitsWarper(sampling.temperature),
        *([hf.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []),
        hf.TopPLogitsWarper(sampling.top_p),
        hf.MinPLogitsWarper(sampling.min_p),
    ]
    scores = logits[None]
    for processor in processors:
        scores = processor(torch.tensor([prompt_ids]), scores)
    return torch.softmax(scores[0], -1)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "penalty"),
    [*itertools.product((0, 1, 7), (1.0, 0.8, 0.05), (0.0, 0.1, 1.0), (1.0, 1.3)), (VOCABULARY + 5, 0.9, 0.02, 0.7)],
)
@pytest.mark.parametrize("first_sorted", [3, 256])
def test_the_distribution_is_that_of_transformers(monkeypatch, top_k, top_p, min_p, penalty, first_sorted):
    """Also where few of the tokens are sorted at first, so that more are needed."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(sampling_module, "_FIRST_SORTED", first_sorted)
    prompt_ids = [3, 5, 5, 70, 210]
    for seed, temperature in enumerate((0.6, 1.0, 2.5)):
        sampling = Sampling(temperature, top_k, top_p, min_p=min_p, repetition_penalty=penalty)
        ours = Sampler(sampling, prompt=prompt_ids).probabilities(seeded_logits(seed))
        expected = theirs(sampling, seeded_logits(seed), prompt_ids)
        assert torch.equal(ours > 0, expected > 0)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


def test_of_equal_tokens_the_lower_ids_are_kept():
    logits = torch.zeros(600)
    logits[::2] = 1.0
    ids = Sampler(Sampling(1.0, top_k=3)).probabilities(logits).nonzero().flatten()
    assert ids.tolist() == [0, 2, 4]
    most = Sampler(Sampling(1.0, top_p=0.5)).probabilities(logits).nonzero().flatten()
    assert most.tolist() == list(range(0, 2 * len(most), 2))
    # 300 tokens of weight e beside 300 of weight 1.
    assert len(most) == -(-0.5 * 300 * (torch.e + 1) // torch.e)


def test_tokens_are_drawn_from_that_distribution():
    sampling, logits = Sampling(1.0, top_k=5, min_p=0.2), seeded_logits(0) / 4
    expected = Sampler(sampling).probabilities(logits)
    sampler = Sampler(sampling)
    counts = torch.bincount(torch.tensor([sampler.next(logits) for _ in range(4000)]), minlength=VOCABULARY) / 4000
    assert 1 < (expected > 0).sum() <= 5
    torch.testing.assert_close(counts.double(), expected, rtol=0, atol=0.03)


def test_a_penalty_counts_the_prompt_and_each_new_token_also_when_greedy():
    logits = torch.tensor([4.0, 3.5, 3.0, -1.0])
    sampler = Sampler(Sampling(repetition_penalty=1.5), prompt=[0])
    assert [sampler.next(logits) for _ in range(3)] == [1, 2, 0]
    assert logits.tolist() == [4.0, 3.5, 3.0, -1.0]  # the caller's own


def test_each_sequence_has_a_seed_of_its_own():
    flat, sampler = torch.zeros(2, 1000), BatchSampler(Sampling(1.0, seed=7), [[], []])
    together = [sampler.next(flat, [0, 1]).tolist() for _ in range(6)]
    alone = [Sampler(Sampling(1.0, seed=seed)) for seed in (7, 8)]
    assert together == [[one.next(flat[0]) for one in alone] for _ in range(6)]
    assert len({token for tokens in together for token in tokens}) > 8


NAN, INF = float("nan"), float("inf")
OUTSIDE = {
    "temperature": (-1, NAN, INF), "top_p": (0, 1.5, NAN), "top_k": (-1,), "min_p": (-0.1, 1.1, NAN),
    "seed": (-1, 2**62 + 1, 2**64),
    "repetition_penalty": (0, 9e-4, 1001, -1, INF, NAN),
}  # fmt: skip


@pytest.mark.parametrize(("setting", "value"), [(setting, value) for setting, values in OUTSIDE.items() for value in values])
def test_a_value_outside_its_range_is_refused(setting, value):
    with pytest.raises(InputError, match=setting.replace("_", ".")):
        Sampling(**{setting: value})


def test_the_ends_of_a_range_are_taken():
    logits = seeded_logits(0)
    for setting in ({"seed": 2**62}, {"repetition_penalty": 1e-3}, {"repetition_penalty": 1e3}):
        probabilities = Sampler(Sampling(1.0, **setting), index=3, prompt=[5]).probabilities(logits)
        assert probabilities.isfinite().all()


@pytest.mark.parametrize("temperature", [1e-320, 5e-324, 1e-300])
def test_next_to_no_temperature_draws_the_most_likely(temperature):
    logits = seeded_logits(0)
    sampler = Sampler(Sampling(temperature, top_p=0.9, min_p=0.1))
    assert sampler.probabilities(logits).sum() == 1
    assert sampler.next(logits) == int(logits.argmax())


# -- Several sequences at once ---------------------------------------------------------------------------------------------
SETTINGS = [
    Sampling(), Sampling(repetition_penalty=1.4), Sampling(1.0, seed=5), Sampling(0.8, top_k=9, seed=5),
    Sampling(1.3, top_p=0.9, min_p=0.01, repetition_penalty=1.2), Sampling(0.7, top_k=20, top_p=0.8),
]  # fmt: skip
PROMPTS = [[3, 5, 5], [7], [210, 0, 3]]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The way that a GPU's logits go: all sequences at once, the whole vocabulary sorted."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))


def draw(next_tokens, steps=12):
    """Tokens by step, of logits and the rows that they are of; the second sequence ends after the third step."""
    tokens = []
    for step in range(steps):
        rows = [0, 1, 2] if step < 3 else [0, 2]
        tokens.append(next_tokens(torch.stack([seeded_logits(step * 10 + row) / 2 for row in rows]), rows))
    return tokens


def drawn_together(sampling):
    sampler = BatchSampler(sampling, PROMPTS)
    return draw(lambda logits, rows: sampler.next(logits, rows).tolist())


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_sequences_drawn_together_draw_what_each_draws_alone(sampling):
    alone = [Sampler(sampling, index, prompt) for index, prompt in enumerate(PROMPTS)]
    assert drawn_together(sampling) == draw(lambda logits, rows: [alone[row].next(logits[i]) for i, row in enumerate(rows)])


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_a_gpu_draws_what_the_cpu_draws(request, sampling):
    on_cpu = drawn_together(sampling)
    request.getfixturevalue("as_on_a_gpu")
    assert drawn_together(sampling) == on_cpu


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_drawing_does_not_wait_for_the_device(sampling):
    """Torch's meta device has no numbers: whatever waits for one raises."""
    sampler, logits = BatchSampler(sampling, PROMPTS), torch.empty(3, VOCABULARY, device="meta")
    assert sampler.next(logits, [0, 1, 2]).device.type == "meta"
    assert sampler.next(logits[1:], [0, 2]).shape == (2,)


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.5)])
@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_random_numbers_draw_tokens_that_may_be_drawn(monkeypatch, sampling, u):
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(u, dtype=torch.float64))
    logits = torch.full((40,), -torch.inf)
    logits[5:20] = torch.linspace(0, 1, 15)
    token = Sampler(sampling).next(logits)
    assert Sampler(sampling).probabilities(logits)[token] > 0
    assert token == ((5 if sampling == Sampling(1.0) else 19) if u == 0 else token)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.0, top_k=15, min_p=0.5)])
def test_sums_that_rise_by_rounding_alone_draw_no_token_without_weight(monkeypatch, sampling):
    """A GPU sums in parallel: of tokens without weight, too, a sum may be another than the one before."""
    cumsum = torch.Tensor.cumsum
    rounding = 1 + 2.0**-52 * torch.arange(40, dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: cumsum(x, dim) * rounding[: x.shape[-1]])
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(1 - 2.0**-53, dtype=torch.float64))
    logits = torch.full((40,), -torch.inf)
    logits[5:20] = torch.linspace(0, 1, 15).flip(0)
    token = Sampler(sampling).next(logits)
    assert token == (19 if sampling == Sampling(1.0) else 14)
    assert Sampler(sampling).probabilities(logits)[token] > 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.5), Sampling(1.0, 3, 0.9, min_p=0.1), Sampling(0.5, 0, 0.7)])
def test_rows_that_stand_for_no_token_are_not_drawn(sampling):
    """What is drawn of the others is as if there were no such rows."""
    unused, logits = (2, 50, VOCABULARY - 1), seeded_logits(0)
    padded, others = logits.clone(), [id for id in range(VOCABULARY) if id not in (2, 50, VOCABULARY - 1)]
    padded[list(unused)] = 20.0
    ours = BatchSampler(sampling, [[2]], unused_ids=unused)
    alone = BatchSampler(sampling, [[0]])
    for _ in range(50):
        assert ours.next(padded[None], [0]).tolist() == [others[int(alone.next(logits[None, others], [0]))]]
    assert ours.best(padded[None], [0]).tolist() == [others[int(logits[others].argmax())]]


@pytest.mark.parametrize("draft", [None, "ngram"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.01}, {"repetition_penalty": 1.01}])
def test_a_row_without_a_token_is_never_said(tmp_path, monkeypatch, draft, settings):
    """Rows beyond the tokenizer's tokens and between them, which transformers would say and show as nothing."""
    library = json.loads(byte_tokenizer().to_str())
    library["model"]["vocab"][byte_tokenizer().id_to_token(200)] = 298

    def mutate(tensors):
        saying("Hi", endless=True)(tensors)
        for id in (200, 259, 299):  # liked better than any token, whatever came before
            tensors[HEAD][id] = 2 * tensors[HEAD].sum(0)

    files = {"tokenizer.json": json.dumps(library)}
    folder = write_checkpoint(tmp_path / "m", config={"vocab_size": 300}, mutate=mutate, files=files)
    monkeypatch.setattr(Pace, "tokens", lambda self, *_: self._most)
    session = tq.load(folder, kv="tq4", draft=draft)
    assert session.tokenizer.unused_ids == (200, *range(257, 298), 299)
    result = session.generate("i", max_new_tokens=24, **settings)
    assert result.texts == ["Hi" * 12]
    assert (draft is None) or result.drafting.accepted


def test_of_equally_likely_tokens_greedy_takes_the_lowest():
    logits = torch.zeros(2, 9)
    logits[0, [4, 7]] = logits[1, [0, 8]] = 2.5
    assert BatchSampler(Sampling(), [[], []]).next(logits, [0, 1]).tolist() == [4, 0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_a_gpu_draws_what_the_cpu_draws_and_nobody_waits(sampling):
    generator = torch.Generator().manual_seed(0)
    batch = [2 * torch.randn(3, 4000, generator=generator) for _ in range(8)]
    on_cpu = BatchSampler(sampling, PROMPTS)
    expected = [on_cpu.next(logits, [0, 1, 2]).tolist() for logits in batch]
    on_gpu, ours = [logits.cuda() for logits in batch], BatchSampler(sampling, PROMPTS)
    draws = [ours.next(on_gpu[0], [0, 1, 2])]  # it brings the prompts there
    torch.cuda.set_sync_debug_mode("error")
    try:
        draws += [ours.next(logits, [0, 1, 2]) for logits in on_gpu[1:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [tokens.tolist() for tokens in draws] == expected
