"""The cache chosen for a model: the texts it is chosen by, the choice, and what is remembered of it."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint

import tq
from haarkv.engine.plans import plan_for
from haarkv.executors.npu import NpuExecutor
from haarkv.models.catalog import TINY
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation.fidelity.evaluation import Setup, Workload, evaluate
from haarkv.validation.planning import auto, choice_cache
from haarkv.validation.planning.calibrate import load_subject
from haarkv.validation.planning.common_text import SEQUENCES, samples, start_token, write
from haarkv.validation.planning.search import bits_per_value, session_with_plan
from tq.cli import main

pytestmark = pytest.mark.chooses

LOSS = 0.0004
"""Tiny loses little: a bound that takes more than its smallest cache."""


@pytest.fixture(scope="module")
def subject():
    return load_subject("tiny")


@pytest.fixture(scope="module")
def choice(subject):
    return auto.choose(subject, loss=LOSS)


@pytest.fixture
def at_home(monkeypatch, tmp_path):
    monkeypatch.setattr(choice_cache, "home", lambda: tmp_path / "kv-auto")
    return tmp_path / "kv-auto"


def test_a_model_writes_texts_of_its_own_from_its_start_token(subject):
    session = subject.session(KVSpec("bf16"))
    ids = write(session, 200)
    length = -(-200 // SEQUENCES)
    assert len(ids) == 200
    assert set(ids[::length].tolist()) == {start_token(session.tokenizer)}
    assert torch.equal(ids, write(session, 200))
    others = write(session, 200, seed=SEQUENCES)
    assert not torch.equal(ids, others)
    # Drawn, and not the likeliest: texts differ from each other.
    assert len({tuple(text.tolist()) for text in ids.split(length)}) == SEQUENCES


def test_the_chosen_cache_is_under_the_bound_and_spends_it(choice):
    """What was judged last comes close to the bound; the smallest of those under it is taken, whatever came first."""
    under = [row for row in choice.rows if row.kl_mean <= LOSS]
    assert choice.row == min(under, key=lambda row: row.bits_per_value)
    assert choice.row.kl_mean > 0.3 * LOSS
    assert len(choice.rows) <= auto._TRIED_AT_MOST + 1
    assert (choice.spec.tail, choice.spec.sink) == (124, 4)
    plan = plan_for(choice.spec, choice.config)
    bits = bits_per_value(plan, choice.config, 2048 if choice.config.max_position_embeddings == 2048 else 4096)
    assert f"once for this model: {bits:.2f} bits a value" in str(choice)
    assert len(f"tq: {choice}") <= 80


def test_other_formats_cost_by_what_their_levels_leave(choice):
    for (_, side), by_name in choice.costs.items():
        losses = [by_name[name] for name in auto.FORMATS[side]]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] == 0
        # A bit more leaves about a quarter.
        ratios = [a / b for a, b in itertools.pairwise(losses[:-1])]
        assert all(1.5 < ratio < 6 for ratio in ratios), ratios


@pytest.mark.parametrize("share", [0.3, 1, 4])
def test_what_is_chosen_for_npu_is_what_its_programs_read(choice, share):
    """Whether the bound takes the best formats that it reads, the smallest, or no packed ones at all."""
    config = choice.config
    names = auto.reading(config, "npu").names
    costs = {place: {name: by_name[name] for name in names[place[1]]} for place, by_name in choice.costs.items()}
    budget = share * sum(by_name["lr4" if side == "k" else "tq4"] for (_, side), by_name in costs.items())
    plan = auto.smallest({124: costs}, config, budget, choice.file.calibration)
    assert plan.has_windows == (share >= 1)
    assert NpuExecutor.supports(config, plan) is None
    assert NpuExecutor.supports(config, plan_for(choice.spec, config))


@pytest.mark.parametrize(("head_dim", "executor"), [(16, None), (128, auto.NO_TAIL)], ids=["unlearned", "without a tail"])
def test_a_choice_is_of_what_is_read_and_remembered(tmp_path, head_dim, executor):
    """Where keys cannot be learned, and where an executor reads no tail."""
    subject = load_subject(str(write_checkpoint(tmp_path / "model", config={"head_dim": head_dim})))
    choice = auto.choose(subject, executor=executor)
    plan = plan_for(choice.spec, choice.config)
    assert (plan.recent, plan.sink) == ((None, 0) if executor else (124, 4))
    has_learned_keys = any(k.name.startswith("lr") for k, _ in plan.layers)
    assert (has_learned_keys, choice.file is not None) == (head_dim == 128,) * 2
    assert choice.row.kl_mean <= auto.LOSS
    choice_cache.remember(tmp_path / "choice", choice)
    assert plan_for(choice_cache.chosen_before(tmp_path / "choice"), choice.config).describe() == plan.describe()


def test_a_choice_for_npu_is_remembered_apart(at_home):
    files = [choice_cache.file_for("tiny", LOSS, executor=name) for name in (None, "auto", "cpu", "npu")]
    assert len(set(files[:3])) == 1
    assert files[3] not in files[:3]


def test_no_plan_of_fewer_bytes_would_do(choice):
    """By its costs, the smallest plan for a bound stays under it, and a step of bits less does not."""
    config, calibration = choice.config, choice.file.calibration
    budget = sum(by_name["lr4" if side == "k" else "tq4"] for (_, side), by_name in choice.costs.items())
    uniform = plan_for(KVSpec("k=lr4,v=tq4", 124, 4, calibration=calibration), config)
    plan = auto.smallest({124: choice.costs}, config, budget, calibration)
    loss = sum(choice.costs[i, side][f.name] for i, pair in enumerate(plan.layers) for side, f in zip("kv", pair, strict=True))
    context = min(auto.CONTEXT, config.max_position_embeddings)
    assert loss <= budget
    assert bits_per_value(plan, config, context) <= bits_per_value(uniform, config, context)
    assert {f.name for f in auto.smallest({124: choice.costs}, config, 0.0, calibration).formats} == {"bf16"}


def test_a_tail_is_taken_where_it_saves_bytes(choice):
    config, calibration = choice.config, choice.file.calibration
    budget = sum(by_name["lr4" if side == "k" else "tq4"] for (_, side), by_name in choice.costs.items())
    for times, tail in ((1.0, 60), (50.0, 124)):
        shorter = {place: {name: times * cost for name, cost in by_name.items()} for place, by_name in choice.costs.items()}
        assert auto.smallest({124: choice.costs, 60: shorter}, config, budget, calibration).recent == tail


def test_a_choice_is_measured_as_any_evaluation_measures(subject, choice):
    """On the second half of the text, after all of its first."""
    ids = torch.tensor(samples(subject.tokenizer, auto.TOKENS))
    base, half = subject.session(KVSpec("bf16", 124, 4)), len(ids) // 2
    side = session_with_plan(base, plan_for(choice.spec, choice.config))
    setup = Setup(subject.model, base, {"auto": side}, "")
    rows = {count: evaluate(setup, Workload(ids, [range(count)]))[-1] for count in (half, len(ids) - 1)}
    of_all, of_half = (row.kl_mean * count for count, row in reversed(rows.items()))
    assert choice.row.kl_mean * (len(ids) - half) == pytest.approx(of_all - of_half, rel=0.03)


def test_the_text_tells_fourteen_samples_in_turns_after_one_start_token(subject):
    """What a piece continues lies behind the newest tokens, which caches store in BF16."""

    class Starting:
        """A tokenizer that begins each text with a start token, as Gemma's does."""

        def encode(self, text):
            return [-1, *subject.tokenizer.encode(text)]

    ids, starting = samples(subject.tokenizer, auto.TOKENS - 1), samples(Starting(), auto.TOKENS)
    assert starting == [-1, *ids]
    pieces = torch.tensor(ids).view(4, 14, -1)
    assert pieces[0].numel() > auto.TAIL + pieces.shape[-1]
    told = [subject.tokenizer.decode(sample.flatten().tolist()).rstrip("\ufffd") for sample in pieces.transpose(0, 1)]
    text = (Path(auto.__file__).parent / "samples.txt").read_text(encoding="utf-8")
    assert all(text.count(sample) == 1 for sample in told)
    assert len(set(told)) == 14


def choosing(monkeypatch, choose):
    """Let `choose` choose, for no model."""
    monkeypatch.setattr(choice_cache, "load_subject", lambda model, **how: None)
    monkeypatch.setattr(choice_cache, "choose", choose)


def test_a_choice_is_remembered_and_made_again_where_its_file_is_damaged(at_home, choice, monkeypatch):
    losses = []

    def choose(subject, loss, *_):
        losses.append(loss)
        return choice

    choosing(monkeypatch, choose)
    messages = []
    first = choice_cache.cache_for("tiny", loss=0.002, on_choice=messages.append)
    again = choice_cache.cache_for("tiny", loss=0.002, on_choice=messages.append)
    assert losses == [0.002]
    assert messages == [str(choice)]
    assert again.plan(6).describe() == first.plan(6).describe()
    assert again.weights == first.weights == choice.file.fingerprint
    (file,) = at_home.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    choice_cache.cache_for("tiny", loss=0.002)
    choice_cache.cache_for("tiny", loss=0.01)
    assert losses == [0.002, 0.002, 0.01]


def test_a_choice_is_that_of_settings_weights_and_tokenizer(at_home, tmp_path):
    """Of one file, and of shards; what else is written to the folder changes nothing."""
    shards = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    for content, what_counts in ((None, "model.safetensors"), (shards, "two.safetensors")):
        folder = tmp_path / what_counts
        shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        if content:
            (folder / "model.safetensors.index.json").write_text(json.dumps(content))
            for name in content["weight_map"].values():
                (folder / name).write_bytes(b"1")
        before = choice_cache.file_for(str(folder), LOSS)
        for other in ("notes.txt", "learned.safetensors", "README.md", "tokenizer_config.json"):
            (folder / other).write_text("{}")
            assert choice_cache.file_for(str(folder), LOSS) == before, other
        paths = {before}
        for name in ("config.json", "tokenizer.json", what_counts):
            with (folder / name).open("ab") as file:
                file.write(b" ")
            assert choice_cache.file_for(str(folder), LOSS) not in paths, name
            paths.add(choice_cache.file_for(str(folder), LOSS))


def test_the_command_takes_the_choice_and_says_it_once(at_home, choice, monkeypatch, capsys):
    choosing(monkeypatch, lambda *_: choice)
    for count in (1, 0):
        args = ["--kv", "auto", "--kv-loss", "0.002", "--prompt", "def", "--max-new-tokens", "2", "--json"]
        assert main(["generate", *args]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["kv"]["format"] == plan_for(choice.spec, choice.config).summary()
        assert err.count(f"tq: {choice}") == count


def test_where_nothing_can_be_kept_the_choice_is_used_all_the_same(choice, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(choice_cache, "home", lambda: tmp_path / "file")
    choosing(monkeypatch, lambda *_: choice)
    assert choice_cache.cache_for("tiny", loss=0.002) is choice.spec


def test_load_takes_what_the_command_takes(at_home):
    """The choice is said once and remembered; what sets the whole cache stands alone."""
    messages = []
    session = tq.load("tiny", kv="auto", kv_loss=0.05, on_choice=messages.append)
    assert len(messages) == 1
    assert session.plan.sink == auto.SINKS
    again = tq.load("tiny", kv="auto", kv_loss=0.05, on_choice=messages.append)
    assert len(messages) == 1
    assert again.plan.describe() == session.plan.describe()
    (file,) = at_home.iterdir()
    learned_session = tq.load("tiny", kv="k=lr3,v=tq3", calibration=file, tail=16, sink=2)
    assert learned_session.plan.describe() == "k=lr3,v=tq3; tail 16; sink 2"
    assert tq.load("tiny", plan=file).plan.describe() == session.plan.describe()
    with pytest.raises(InputError, match="--kv auto sets the whole cache; leave out --kv-tail"):
        tq.load("tiny", kv="auto", tail=3)
    with pytest.raises(InputError, match="--kv-plan sets the whole cache; leave out --kv"):
        tq.load("tiny", kv="tq4", plan=file)
    with pytest.raises(InputError, match="--kv-loss says what --kv auto may lose"):
        tq.load("tiny", kv="tq4", kv_loss=0.1)
