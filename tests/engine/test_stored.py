"""Stored sequences: they go on as if they had never stopped, are read where they belong, and damaged files are refused."""

import io
import json
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bases import calibration
from checkpoints import write_checkpoint
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_models import small_model

import tq
from haarkv.engine.generation import generate, tail_chunk
from haarkv.engine.plans import shape_of
from haarkv.engine.session import Session
from haarkv.executors.catalog import create
from haarkv.models.caches import new_cache
from haarkv.models.config import Attention, Dense, Layer, ModelConfig, Norm, Rope
from haarkv.models.layer import DeltaNet
from haarkv.tq_ops import artifact
from haarkv.tq_ops.artifact import CACHE
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv import cache_file
from haarkv.tq_ops.kv.batch import CacheFullError, PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.shapes import KEPT_CHUNK, KEPT_ROOM, KVShape
from haarkv.tq_ops.kv.stored import StoredSequence, put, requantized, reusable, take
from tq.cli import main

SPECS = {
    "tq4": KVSpec("tq4"),
    "mixed": KVSpec("k=tq5,v=tq3", skip_layers=(0,)),
    "kivi2": KVSpec("kivi2"),
    "tail and sinks": KVSpec("tq4", tail=40, sink=4),
    "groups and a tail": KVSpec("k=kivi2,v=tq4", tail=50, sink=2),
}
PROMPT = "import os\nimport sys\n\n" * 20


@pytest.fixture(scope="module", params=SPECS)
def session(request):
    return tq.load("tiny", kv=SPECS[request.param], executor="reference", allow_collapse=True, on_warning=lambda _: None)


def same(one, other):
    return one.tensors.keys() == other.tensors.keys() and all(
        torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items()
    )


def test_a_saved_sequence_goes_on_byte_for_byte(session, tmp_path):
    """The file is written in the middle of a text; what follows, and every byte of K and V, is that of one run."""
    whole = session.generate(PROMPT, max_new_tokens=6, keep=True)
    part = session.generate(PROMPT, max_new_tokens=4, keep=True)
    session.save_cache(tmp_path / "c", part.stored[0])
    rest = session.generate([], stored=session.load_cache(tmp_path / "c"), max_new_tokens=2, keep=True)
    assert part.texts[0] + rest.texts[0] == whole.texts[0]
    assert part.completions[0].token_ids + rest.completions[0].token_ids == whole.completions[0].token_ids
    assert same(whole.stored[0], rest.stored[0])
    assert rest.completions[0].reused_tokens == part.stored[0].length == rest.completions[0].prompt_tokens - 1
    assert rest.timing.prefill_tokens == 1


def test_a_shared_prefix_is_not_computed_again(session):
    stored = session.generate(PROMPT, max_new_tokens=1, keep=True).stored[0]
    for text in (PROMPT + "class Knight:", PROMPT[:-60] + "def eggs(spam):\n    return", "spam"):
        ids = session.encode([text])[0]
        alone, shared = (session.generate(text, max_new_tokens=3, stored=of) for of in (None, stored))
        assert shared.texts == alone.texts
        reused = shared.completions[0].reused_tokens
        assert reused == reusable(stored, ids, session.new_cache(1, 128)[0])
        assert ids[:reused] == list(stored.token_ids[:reused])
        assert shared.timing.prefill_tokens == len(ids) - reused
        assert reused or session.plan.keeps_tokens or text == "spam"


# -- Where a prefix may be cut ---------------------------------------------------------------------------------------------


def stored_of(plan, tokens=300, room=KEPT_CHUNK, turn=None):
    generator = torch.Generator().manual_seed(1)
    cache = PagedKVCache(plan, KVShape(1, 64), num_blocks=4, num_rows=2, room=room)
    paging = PagedSequences(4, 128, order=[2, 0, 3, 1], num_rows=2)
    paging.add()
    sequence = paging.add()
    x, earlier = torch.randn(tokens, 1, 64, generator=generator), None
    # What a format has restored lies in the middle of its levels: none depends on how many are stored at once.
    x = plan.k(0).dequantize(plan.k(0).quantize(x, 0), 0) if plan.k(0).group_tokens == 1 else x
    for begin in range(0, tokens, step := min(50, room)):
        if begin == turn:
            earlier = take(cache, paging, sequence, range(turn), whole=False)
        batch = paging.batch([sequence], [min(step, tokens - begin)])
        cache.write(0, x[batch.positions], -x[batch.positions], batch)
    return x, take(cache, paging, sequence, range(tokens), earlier=earlier)


@pytest.mark.parametrize("spec", [KVSpec("tq4"), KVSpec("tq4", tail=30, sink=3), KVSpec("kivi2"), KVSpec("kivi2", tail=70)])
def test_a_prefix_stores_what_the_whole_did(spec):
    """A sequence put back up to any length that `reusable` allows, and continued, holds the bytes of one never cut."""
    plan = spec.plan(1)
    x, stored = stored_of(plan)
    allowed = []
    for length in (1, 100, 200, 236, 250, 268, 299):
        other = [*range(length), *([-1] * (300 - length))]
        cache = PagedKVCache(plan, KVShape(1, 64), num_blocks=4, num_rows=1)
        common = reusable(stored, other, cache)
        assert common in (0, length)
        allowed += [length] * bool(common)
        paging = PagedSequences(4, 128, num_rows=1)
        sequence = put(stored, cache, paging, common)
        for begin in range(common, 300, 50):
            batch = paging.batch([sequence], [min(50, 300 - begin)])
            cache.write(0, x[batch.positions], -x[batch.positions], batch)
        assert same(take(cache, paging, sequence, range(300)), stored)
    # The ring has 64 tokens beside the tail, and the group that the next token is in must be whole.
    least = 300 - 64 + plan.k(0).group_tokens if plan.keeps_tokens else 0
    assert allowed == [length for length in (1, 100, 200, 236, 250, 268, 299) if length >= least]


def test_only_the_last_token_is_left_of_a_prompt_that_is_stored():
    plan = KVSpec("tq4").plan(1)
    _, stored = stored_of(plan)
    cache = PagedKVCache(plan, KVShape(1, 64), num_blocks=1)
    assert reusable(stored, range(300), cache) == 299
    assert reusable(stored, range(40), cache) == 39
    assert reusable(stored, [7, *range(1, 300)], cache) == 0


def test_what_others_left_in_a_block_is_not_taken():
    plan = KVSpec("tq4", tail=4, sink=2).plan(1)
    cache = PagedKVCache(plan, KVShape(1, 64), num_blocks=1, num_rows=1)
    paging = PagedSequences(1, 128, num_rows=1)
    taken = []
    for tokens in (60, 9):
        sequence = paging.add()
        batch = paging.batch([sequence], [tokens])
        x = torch.randn(tokens, 1, 64, generator=torch.Generator().manual_seed(tokens))
        cache.write(0, x, x, batch)
        taken.append(take(cache, paging, sequence, range(tokens)))
        paging.free(sequence)
    assert not any(tensor[:, :, 9:].any() for name, tensor in taken[1].tensors.items() if not name.endswith("window"))
    assert (taken[1].tensors["layers.0.k.window"] != 0).any(-1).sum() == 9 + 2  # the ring holds all; sinks lie there twice
    assert taken[0].nbytes == taken[1].nbytes


def test_a_sequence_that_does_not_fit_begins_nothing():
    plan = KVSpec("tq4").plan(1)
    _, stored = stored_of(plan)
    cache, paging = PagedKVCache(plan, KVShape(1, 64), num_blocks=2), PagedSequences(2, 128)
    with pytest.raises(CacheFullError):
        put(stored, cache, paging)
    assert put(stored, cache, paging, 256) is not None


# -- The next turn ---------------------------------------------------------------------------------------------------------

PHASES = [Phase.explicit, Phase.generate]  # what is drawn here is small as it is
DEFAULT = KVSpec("k=tq6,v=tq4", tail=24, sink=4)
HEADS = Attention(2, 1, 64, Rope(1e4, 64), 0.125, head_norms=True)


def of_mixers(*mixers):
    layers = tuple(Layer(mixer, Dense(80), Norm(1e-6, plus_one=True)) for mixer in mixers)
    return small_model(ModelConfig("qwen3_5", layers, 48, 61, Norm(1e-6, plus_one=True), max_position_embeddings=1024))


TURNS = {
    "plain": (of_mixers(HEADS, HEADS), DEFAULT),
    "groups": (of_mixers(HEADS, HEADS), KVSpec("kivi2", tail=40)),
    "windows": (of_mixers(replace(HEADS, window=30), HEADS), DEFAULT),
    "windows alone": (of_mixers(replace(HEADS, window=30), HEADS), KVSpec("tq4")),
    "states": (of_mixers(DeltaNet(2, 4, 48, 32, versions=2), HEADS), DEFAULT),
}


def turn(executor, plan, prompt, new, stored=None):
    """An answer, and prompt and answer as they are stored."""
    cache, paging = new_cache(executor.config, plan, sequences=1, tokens=len(prompt) + new, chunk=tail_chunk(executor))
    ends = []
    (done,), _ = generate(
        executor, cache, paging, [prompt], max_new_tokens=new, max_context=len(prompt) + new, stored=[stored],
        on_end=lambda _, stored: ends.append(stored),
    )  # fmt: skip
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
    origin = cache_file.origin_of(plan, shape_of(model.config), "weights")
    alike = executor.batches_alike and not any(kv_format.to_compare for kv_format in plan.formats)

    @settings(max_examples=6 if alike else 1, deadline=None, derandomize=True, database=None, phases=PHASES)
    @given(
        st.randoms(use_true_random=False), st.integers(1, 330), st.integers(1, 40), st.sampled_from(["end", "before", "any"])
    )
    @example(random.Random(1), 128, 40, "end")
    @example(random.Random(2), 300, 400 if name == "windows" and alike else 40, "end")
    @example(random.Random(3), 300, 40, "before")
    def check(draw, length, new, parting):
        prompt = draw.choices(range(61), k=length)
        stored = turn(executor, plan, prompt, new)[1]
        cache_file.save(tmp_path / "c", stored, origin, compress=draw.random() < 0.5)
        common = {"end": length, "before": max(length - 6, 1), "any": draw.randrange(stored.length + 1)}[parting]
        following = [*stored.token_ids[:common], *draw.choices(range(61), k=30)]
        done, after = turn(executor, plan, following, 5, cache_file.load_for(tmp_path / "c", origin, plan))
        fresh, expected = turn(executor, plan, following, 5)
        assert done.token_ids == fresh.token_ids
        if common >= length:
            assert done.reused_tokens >= length
        elif name in ("plain", "states") and parting == "before" and length > KEPT_ROOM:
            assert done.reused_tokens > length - KEPT_ROOM
        if not alike:  # its sums follow the cut: this one is cut there as well
            expected = turn(executor, plan, following, 5, turn(executor, plan, prompt, 1)[1])[1]
        if alike or done.reused_tokens == length:
            assert after.tensors.keys() == expected.tensors.keys()
            for key, tensor in after.tensors.items():  # of a state other versions may be there beside the newest
                part = slice(None) if ".k." in key or ".v." in key else -1
                assert torch.equal(tensor[part], expected.tensors[key][part]), key

    check()


def test_a_turn_s_begin_costs_what_answers_replace_and_no_more():
    """Of every layer, side and head what stays in BF16; nothing where nothing is replaced, or nothing was answered."""

    def earlier(spec, new):
        session = tq.load("tiny", kv=spec, executor="cpu", allow_collapse=True, on_warning=lambda _: None)
        stored = session.generate([[1, 2, 3]], max_new_tokens=new, keep=True).stored[0]
        assert stored.nbytes == sum(t.nbytes for t in stored.tensors.values()) + (
            stored.earlier.nbytes if stored.earlier else 0
        )
        return stored.earlier and stored.earlier.nbytes

    assert earlier(KVSpec("tq4", tail=124, sink=4), 2) == 6 * 2 * 2 * (4 + 124 + KEPT_ROOM) * 128 * 2
    assert earlier(KVSpec("tq4", tail=124, sink=4), 1) is None
    assert earlier(KVSpec("tq4", sink=4), 2) is None
    assert earlier(KVSpec("tq4"), 2) is None


# -- Another format --------------------------------------------------------------------------------------------------------


def test_requantizing_keeps_what_is_known_best():
    """From `tq8` the error is that of `tq4`; tokens that the window still holds go over in BF16 without loss."""
    before, after = KVSpec("tq8", tail=40, sink=2).plan(1), KVSpec("tq4", tail=40, sink=2).plan(1)
    x, stored = stored_of(before, room=KEPT_ROOM)
    changed = requantized(stored, before, after, KVShape(1, 64))
    assert torch.equal(changed.tensors["layers.0.k.window"], stored.tensors["layers.0.k.window"])
    _, direct = stored_of(after, room=KEPT_ROOM)
    of = after.k(0)
    fields = [{n: s.tensors[f"layers.0.k.{n}"] for n in ("codes", "scale")} for s in (changed, direct)]
    errors = [(of.dequantize(f, 0).transpose(1, 2).reshape(-1, 64)[:300] - x[:, 0]).norm() for f in fields]
    assert errors[0] < 1.02 * errors[1]
    assert changed.nbytes < stored.nbytes
    assert (changed.token_ids, changed.length) == (stored.token_ids, stored.length)


@pytest.mark.parametrize("name", TURNS)
def test_a_turn_s_begin_is_requantized_too(name):
    """A sequence goes on from there by the other plan, which may keep other tokens in BF16."""
    model, spec = TURNS[name]
    prompt = random.Random(0).choices(range(61), k=250)
    before, after = spec.plan(model.config.num_layers), KVSpec("tq8", tail=9).plan(model.config.num_layers)
    stored = turn(create("cpu", model, before, None), before, prompt, 60)[1]
    changed = requantized(stored, before, after, model.config.kv_shapes)
    cache_file.origin_of(after, shape_of(model.config), "w").require_fits(changed, after, "it")
    for layer, shape in enumerate(model.config.kv_shapes):
        of, was = changed.of_layer(layer), stored.of_layer(layer)
        assert of.keys() == was.keys() if shape is None else of
        assert (shape is None) == all(torch.equal(of[field], was[field]) for field in of if field in was and field != "seen")
    done, _ = turn(create("cpu", model, after, None), after, [*prompt, 1, 2, 3], 4, changed)
    assert done.reused_tokens == len(prompt)


# -- The file --------------------------------------------------------------------------------------------------------------

SHAPE = ModelShape.uniform(1, 1, 64, 32, 400)


@pytest.fixture(params=[False, True], ids=["plain", "packed"])
def file(request, tmp_path):
    plan = KVSpec("tq4", tail=4).plan(1)
    _, stored = stored_of(plan, room=KEPT_ROOM, turn=240)
    origin = cache_file.origin_of(plan, SHAPE, "weights")
    cache_file.save(tmp_path / "c", stored, origin, compress=request.param)
    return tmp_path / "c", plan, stored, origin


def test_a_file_holds_what_was_stored(file):
    path, plan, stored, origin = file
    found = cache_file.load_for(path, origin, plan)
    assert same(found, stored)
    assert same(found.earlier, stored.earlier)
    assert (found.token_ids, found.length) == (stored.token_ids, 300)
    assert (found.earlier.token_ids, found.earlier.length) == (stored.earlier.token_ids, 240)
    assert cache_file.read_origin(path) == (300, origin)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"shape": replace(SHAPE, hidden_size=64)}, "made for another model"),
        ({"weights": "others"}, "other weights"),
        ({"weights": "weights-0"}, "made with no channels balanced; give --balance off"),
        ({"layers": ("tq3",)}, "stores layer 0 in tq4, and this run in tq3"),
        ({"tail": 8}, "keeps tail 4"),
        ({"sink": 1}, "sink 0"),
        ({"tables": "0" * 16}, "other rotations or learned coordinates"),
    ],
)
def test_another_place_is_refused_by_name(file, other, words):
    path, plan, _, origin = file
    with pytest.raises(InputError, match=words):
        cache_file.load_for(path, replace(origin, **other), plan)


def test_tables_tell_rotations_and_coordinates_apart():
    shape = ModelShape.uniform(2, 1, 64, 32, 400)
    specs = [KVSpec("k=lr3,v=tq4", calibration=calibration(2, 1, 64, seed)) for seed in (0, 1)]
    plans = [KVSpec("tq4").plan(2), KVSpec("tq3").plan(2)]
    plans += [spec.plan(2) for spec in specs]
    tables = [cache_file.origin_of(plan, shape, "w").tables for plan in plans]
    assert len(set(tables)) == len(tables)


def test_every_damaged_file_is_refused_in_one_line(file):
    """500 of them: bits flipped, ends cut off, pieces exchanged."""
    path, plan, stored, origin = file
    content, draw, taken = path.read_bytes(), random.Random(1), 0
    for number in range(500):
        data = bytearray(content)
        if number % 5 == 0:
            data = data[: draw.randrange(len(data))]
        elif number % 5 == 1:
            a, b = (draw.randrange(len(data) - 64) for _ in range(2))
            data[a : a + 64], data[b : b + 64] = data[b : b + 64], data[a : a + 64]
        else:
            data[draw.randrange(len(data) if number % 2 else 900)] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        if data == content:
            continue
        with suppress(InputError):  # a space of the header may be another one
            found = cache_file.load_for(path, origin, plan)
            assert same(found, stored)
            assert same(found.earlier, stored.earlier)
            assert (found.token_ids, found.length) == (stored.token_ids, stored.length)
            taken += 1
    assert taken < 25


def test_content_that_does_not_fit_its_header_is_refused(file):
    """With digests taken anew, as a file would be that another program wrote."""
    path, plan, stored, origin = file
    more = {**stored.tensors, "layers.1.k.codes": torch.zeros(3, 1, 128, 32)}
    for wrong in (
        StoredSequence(stored.token_ids, 300, more),
        StoredSequence(stored.token_ids, 2, stored.tensors),
        StoredSequence(stored.token_ids, 300, {name: tensor.float() for name, tensor in stored.tensors.items()}),
        StoredSequence((999,) * 300, 300, stored.tensors),
        replace(stored, earlier=replace(stored.earlier, tensors={name: t.clone() for name, t in stored.tensors.items()})),
        replace(stored, earlier=replace(stored.earlier, tensors={})),
    ):
        cache_file.save(path, wrong, origin)
        with pytest.raises(InputError, match=r"does not fit|does not know|not of as many blocks"):
            cache_file.load_for(path, origin, plan)


@pytest.mark.parametrize(
    "changed", [{"length": "-1"}, {"length": "1e3"}, {"origin": "[]"}, {"origin": '{"shape": 1}'}, {"earlier": "301"}]
)
def test_metadata_of_another_kind_is_refused(file, changed):
    path, plan, _, origin = file
    tensors = load_file(path)
    metadata = {name: text for name, text in artifact.header(path, CACHE).items() if name != "sha256"}
    artifact.write(path, CACHE, metadata | changed, tensors)
    with pytest.raises(InputError, match=r"is no stored cache: (its (length|origin|model)|not a number)"):
        cache_file.load_for(path, origin, plan)


def test_a_format_that_is_not_known_here_is_named(file):
    path = file[0]
    metadata, tensors = artifact.read(path, CACHE)
    origin = json.loads(metadata["origin"])
    origin["layers"][0] = "k=kvarn4,v=tq4"
    artifact.write(path, CACHE, metadata | {"origin": json.dumps(origin)}, tensors)
    with pytest.raises(InputError, match=r"c is no stored cache: unknown KV format 'kvarn4'"):
        cache_file.read_origin(path)


# -- The command -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    write_checkpoint(tmp_path / "m")
    monkeypatch.chdir(tmp_path)

    def run(*args, model="m"):
        code = main(["cache" if args[0] in ("save", "info", "convert") else "generate", *args]
                           + (["--model", model, "--no-chat"] if args[0] not in ("info", "convert") else []))  # fmt: skip
        return code, *capsys.readouterr()

    return run


def test_cache_commands(run):
    assert run("save", "--prompt", "spam and eggs " * 12, "--no-compress", "--out", "c")[0] == 0
    code, out, _ = run("info", "c", "--json")
    found = json.loads(out)
    assert (code, found["tokens"], found["stored"], found["formats"]) == (0, found["stored"], found["tokens"], ["tq4"] * 2)
    whole = run("--prompt", "spam and eggs " * 12 + "and", "--max-new-tokens", "5", "--json")
    code, out, _ = run("--prompt", "spam and eggs " * 12 + "and", "--max-new-tokens", "5", "--load-cache", "c", "--json")
    assert code == 0
    assert json.loads(out)["text"] == json.loads(whole[1])["text"]
    assert json.loads(out)["reused_tokens"] == found["stored"]
    code, _, err = run("--max-new-tokens", "2", "--load-cache", "c", "--save-cache", "d", "--seed", "1")
    assert code == 0
    assert "were stored already" in err
    code, _, err = run("convert", "d", "--kv", "tq3", "--out", "d")
    assert code == 0
    assert err.endswith(f"; the file has {Path('d').stat().st_size:,} bytes\n")
    assert run("save", "--prompt", "spam and eggs " * 12, "--out", "p")[0] == 0
    assert Path("p").stat().st_size < Path("c").stat().st_size
    # Two tokens take a block, of which nearly all is empty.
    for flag, size in ((), 8_000), (("--no-compress",), 200_000):
        assert run("save", "--prompt", "de", *flag, "--out", "s", model="tiny")[0] == 0
        assert size / 2 < Path("s").stat().st_size < size * 1.1
    assert (
        json.loads(run("--prompt", "spam and eggs " * 12 + "and", "--max-new-tokens", "5", "--load-cache", "p", "--json")[1])[
            "text"
        ]
        == json.loads(whole[1])["text"]
    )
    assert json.loads(run("info", "d", "--json")[1])["formats"] == ["tq3"] * 2
    code, _, err = run("--load-cache", "d", "--max-new-tokens", "1")
    assert (code, err.count("\n")) == (2, 1)
    assert "in tq3, and this run in tq4" in err
    assert run("--load-cache", "d", "--kv", "tq3", "--max-new-tokens", "1")[0] == 0


def test_a_chat_template_for_a_text_that_goes_on_is_refused(run):
    session = tq.load("m", executor="reference", allow_collapse=True, on_warning=lambda _: None)
    stored = session.generate("a", max_new_tokens=2, keep=True).stored[0]
    for said, option in (({"chat": True}, "--chat"), ({"system": "Be brief."}, "--system")):
        with pytest.raises(InputError, match=f"leave out {option}, or give a prompt"):
            session.generate([], stored=stored, **said)
    assert session.generate([], stored=stored, chat=False, max_new_tokens=1).texts


# -- Conversations line by line --------------------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture
def chat(tmp_path, capsys, monkeypatch):
    write_checkpoint(tmp_path / "m", tokenizer_config={"chat_template": TEMPLATE})
    write_checkpoint(tmp_path / "plain")
    monkeypatch.chdir(tmp_path)

    def chat(lines, *args, model="m"):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        code = main(["chat", "--model", model, "--max-new-tokens", "4", *args])
        return code, *capsys.readouterr()

    return chat


@pytest.mark.parametrize("model", ["m", "plain"])
def test_a_conversation_goes_on_after_a_restart(chat, model):
    """Three lines at once, and the third in another process: the same answers, and only what is new is computed."""
    code, whole, _ = chat("spam\n\neggs and ham\nbacon\n", model=model)
    assert code == 0
    code, first, _ = chat("spam\neggs and ham\n", "--session", "s", model=model)
    code, rest, err = chat("bacon\n", "--session", "s", model=model)
    assert code == 0
    assert first + rest == whole
    assert err.splitlines()[0] == "s: 2 earlier messages"
    assert [m["role"] for m in json.loads(cache_file.read_note(Path("s")))] == ["user", "assistant"] * 3


def test_what_was_said_is_not_computed_again(chat, monkeypatch):
    turns = []
    generate = Session.generate

    def counted(self, *args, **kwargs):
        result = generate(self, *args, **kwargs)
        turns.append(result.completions[0])
        return result

    monkeypatch.setattr(Session, "generate", counted)
    assert chat("spam " * 40 + "\neggs\n", "--system", "You are a knight.")[0] == 0
    assert turns[0].reused_tokens == 0
    assert turns[1].reused_tokens >= turns[0].prompt_tokens
    assert turns[1].prompt_tokens - turns[1].reused_tokens < 60


def test_chats_that_cannot_go_on_are_refused(chat):
    assert chat("spam\n", "--session", "s", "--system", "You are a knight.")[0] == 0
    for args, words in (
        (("--session", "s", "--system", "You are a king."), "another system message"),
        (("--session", "s", "--kv", "tq3"), "in tq4, and this run in tq3"),
        (("--session", "m"), "not a regular file"),
        (("--session", "m/config.json"), "is no stored cache"),
    ):
        code, out, err = chat("eggs\n", *args)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err
    code, _, err = chat("eggs\n", "--system", "You are a knight.", model="plain")
    assert (code, err.count("\n")) == (2, 1)
    assert main(["cache", "save", "--model", "m", "--prompt", "spam", "--out", "c"]) == 0
    assert "without a conversation" in chat("eggs\n", "--session", "c")[2]
