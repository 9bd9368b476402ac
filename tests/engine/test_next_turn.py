"""The next turn of a conversation goes on from the end of the prompt before, whatever becomes of the answer."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from small_models import small_model

import tq
from haarkv.engine.generation import GenerationRequest, generate, tail_chunk
from haarkv.engine.plans import shape_signature
from haarkv.executors.catalog import create
from haarkv.models.base import new_cache
from haarkv.models.config import Attention, Dense, Layer, ModelConfig, Norm, Rope
from haarkv.models.layer import DeltaNet
from haarkv.tq_ops.kv import cache_file
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import WINDOW_ROOM

PHASES = [Phase.explicit, Phase.generate]  # what is drawn here is small as it is
DEFAULT = KVSpec("k=tq6,v=tq4", tail=24, sink=4)
HEADS = Attention(2, 1, 64, Rope(1e4, 64), 0.125, head_norms=True)


def mixer_model(*mixers):
    layers = tuple(Layer(mixer, Dense(80), Norm(1e-6, plus_one=True)) for mixer in mixers)
    return small_model(ModelConfig("qwen3_5", layers, 48, 61, Norm(1e-6, plus_one=True), max_position_embeddings=1024))


TURNS = {
    "plain": (mixer_model(HEADS, HEADS), DEFAULT),
    "groups": (mixer_model(HEADS, HEADS), KVSpec("kivi2", tail=40)),
    "windows": (mixer_model(replace(HEADS, window=30), HEADS), DEFAULT),
    "windows alone": (mixer_model(replace(HEADS, window=30), HEADS), KVSpec("tq4")),
    "states": (mixer_model(DeltaNet(2, 4, 48, 32, versions=2), HEADS), DEFAULT),
}


def turn(executor, plan, prompt, new, prefix=None):
    """An answer, and prompt and answer as they are stored."""
    cache, paging = new_cache(executor.config, plan, sequences=1, tokens=len(prompt) + new, chunk=tail_chunk(executor, plan))
    ends = []
    request = GenerationRequest(
        prompts=[prompt], max_new_tokens=new, max_context=len(prompt) + new, stored=[prefix],
        on_end=lambda _, stored: ends.append(stored),
    )  # fmt: skip
    (done,), _ = generate(executor, cache, paging, request)
    return done, ends[0]


@pytest.mark.parametrize(
    ("executor", "name"),
    [*(("cpu", name) for name in TURNS), *(("reference", name) for name in ("plain", "windows", "states"))],
)
def test_the_next_turn_goes_on_from_the_end_of_the_prompt_before(executor, name, tmp_path):
    """Whatever becomes of the answer, through a file: the text is that of a fresh run, on `cpu` so is every stored byte."""
    model, spec = TURNS[name]
    plan = spec.plan(model.config.num_layers)
    executor = create(executor, model, plan, None)
    origin = cache_file.sequence_origin(plan, shape_signature(model.config), "weights")
    batch_invariant = executor.batch_invariant(plan)

    @settings(max_examples=6 if batch_invariant else 1, deadline=None, derandomize=True, database=None, phases=PHASES)
    @given(
        st.randoms(use_true_random=False), st.integers(1, 330), st.integers(1, 40), st.sampled_from(["end", "before", "any"])
    )
    @example(random.Random(1), 128, 40, "end")
    @example(random.Random(2), 300, 400 if name == "windows" and batch_invariant else 40, "end")
    @example(random.Random(3), 300, 40, "before")
    def check(draw, length, new, parting):
        prompt = draw.choices(range(61), k=length)
        sequence = turn(executor, plan, prompt, new)[1]
        cache_file.save(tmp_path / "c", sequence, origin, compress=draw.random() < 0.5)
        common = {"end": length, "before": max(length - 6, 1), "any": draw.randrange(sequence.length + 1)}[parting]
        following = [*sequence.token_ids[:common], *draw.choices(range(61), k=30)]
        done, after = turn(executor, plan, following, 5, cache_file.load_for(tmp_path / "c", origin, plan))
        fresh, expected = turn(executor, plan, following, 5)
        assert done.token_ids == fresh.token_ids
        if common >= length:
            assert done.reused_tokens >= length
        elif name in ("plain", "states") and parting == "before" and length > WINDOW_ROOM:
            assert done.reused_tokens > length - WINDOW_ROOM
        if not batch_invariant:  # its sums follow the cut: this one is cut there as well
            expected = turn(executor, plan, following, 5, turn(executor, plan, prompt, 1)[1])[1]
        if batch_invariant or done.reused_tokens == length:
            assert after.tensors.keys() == expected.tensors.keys()
            for key, tensor in after.tensors.items():  # of a state other versions may be there beside the newest
                part = slice(None) if ".k." in key or ".v." in key else -1
                assert torch.equal(tensor[part], expected.tensors[key][part]), key

    check()


def test_a_turn_s_begin_costs_what_answers_replace_and_no_more():
    """Of every layer, side and head what stays in BF16; nothing where nothing is replaced, or nothing was answered."""

    def earlier(spec, new):
        session = tq.load("tiny", kv=spec, executor="cpu", allow_collapse=True, on_warning=lambda _: None)
        sequence = session.generate([[1, 2, 3]], max_new_tokens=new, keep=True).stored[0]
        assert sequence.nbytes == sum(t.nbytes for t in sequence.tensors.values()) + (
            sequence.earlier.nbytes if sequence.earlier else 0
        )
        return sequence.earlier and sequence.earlier.nbytes

    assert earlier(KVSpec("tq4", tail=124, sink=4), 2) == 6 * 2 * 2 * (4 + 124 + WINDOW_ROOM) * 128 * 2
    assert earlier(KVSpec("tq4", tail=124, sink=4), 1) is None
    assert earlier(KVSpec("tq4", sink=4), 2) is None
    assert earlier(KVSpec("tq4"), 2) is None
