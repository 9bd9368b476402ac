"""Malformed input of every kind: each is refused in one line with exit code 2, or taken; nothing else happens.

A few of each among the ordinary tests, always the same; thousands with `make fuzz`, of a seed.
"""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
from checkpoints import CONFIG, shard_name
from fuzzing import Place, example_counts, limited, run_examples
from hypothesis import strategies as st
from mutations import NUMBERS, TEMPLATES, WORDS, damaged_bytes, templates, wrong_json

from haarkv.models.templates import render
from haarkv.tq_ops import artifact
from haarkv.tq_ops.artifact import CALIBRATION
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats.synthetic import calibration
from haarkv.tq_ops.kv import calibration_file, plan_file
from haarkv.tq_ops.kv.calibration_file import CalibrationFile, make_calibration
from haarkv.tq_ops.kv.model_shape import ModelShape
from haarkv.tq_ops.kv.plan import KVSpec
from tq.cli import main

SHAPE = ModelShape.uniform(2, 2, 32, 64, 257)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("fuzz"))


# -- What is drawn, and what is done with it -------------------------------------------------------------------------------


@contextmanager
def with_content(file, content):
    """A file with another content, for a while."""
    whole = file.read_bytes()
    file.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    try:
        yield
    finally:
        file.write_bytes(whole)


def try_config(place, data):
    base = CONFIG | data.draw(st.sampled_from([
        {}, {"rope_scaling": YARN}, {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2}},
        {"model_type": "qwen2"}, {"model_type": "qwen3_moe", "num_experts": 2, "moe_intermediate_size": 32},
        {"model_type": "mistral", "sliding_window": 4096},
    ]))  # fmt: skip
    content = data.draw(wrong_json(base) | damaged_bytes(json.dumps(base).encode(), head=2000))
    with with_content(place.model / "config.json", content):
        place.run("info", place.model, *data.draw(st.sampled_from([[], ["--json"]])))
        if data.draw(st.booleans()):
            place.generate()


def try_file(place, data):
    """The weights, what stands beside them, and an index of shards."""
    name = data.draw(st.sampled_from([
        "m/generation_config.json", "m/tokenizer_config.json", "m/tokenizer.json", "m/model.safetensors",
        "sharded/model.safetensors.index.json",
    ]))  # fmt: skip
    file = place.folder / name
    content = file.read_bytes()
    wrong = damaged_bytes(content, head=4000)
    if file.suffix == ".json":
        more = {"x": shard_name(0, 2)} if "index" in name else {}
        wrong |= wrong_json({**json.loads(content), **more})
    with with_content(file, data.draw(wrong)):
        place.generate(model=file.parent)


def try_plan(place, data):
    content = plan_file.dumps(KVSpec("tq4", layers={1: "k=tq8,v=tq2"}, tail=3, sink=1).plan(2), SHAPE)
    file = place.folder / "plan.json"
    file.touch()
    with with_content(file, data.draw(wrong_json(json.loads(content)) | damaged_bytes(content.encode(), head=400))):
        place.generate("--kv-plan", file)


SYNTHETIC = calibration(layers=2, heads=2, dim=32)
CALIBRATION_FILE = CalibrationFile(make_calibration(SYNTHETIC.k), SHAPE, "0123456789abcdef", {"tokens": 5})


def try_calibration(place, data):
    with_plan = replace(
        CALIBRATION_FILE, plan=plan_file.dumps(KVSpec("k=lr3,v=tq4", calibration=CALIBRATION_FILE.calibration).plan(2), SHAPE)
    )
    file = place.folder / "learned.safetensors"
    calibration_file.save(file, with_plan)
    content, (metadata, tensors) = file.read_bytes(), artifact.read(file, CALIBRATION)

    def sign(entry):  # by another program
        artifact.write(file, CALIBRATION, metadata | entry, tensors)
        return file.read_bytes()

    wrong = st.sampled_from(["model", "learned", "plan"]).flatmap(
        lambda key: wrong_json(json.loads(metadata[key])).map(lambda text: sign({key: text}))
    )
    file.write_bytes(data.draw(wrong | damaged_bytes(content, head=4000)))
    place.generate(*data.draw(st.sampled_from([["--calibration", file, "--kv", "k=lr3,v=tq4"], ["--kv-plan", file]])))


EVAL = ("eval", "--text", "text.txt", "--kv", "tq4", "--tokens", 8, "--resume", "run.json")


def try_resume(place, data):
    file, command = place.folder / "run.json", (*EVAL, "--model", place.model)
    whole_file = place.folder / "saved"
    if not whole_file.exists():
        assert main(list(map(str, command))) == 0
        file.rename(whole_file)
    file.write_bytes(data.draw(damaged_bytes(whole_file.read_bytes())))
    try:
        # What was saved is on the second line; the first says its SHA-256, and may say more.
        assert place.run(*command) == 2 or file.read_bytes().splitlines()[1:] == whole_file.read_bytes().splitlines()[1:]
    finally:
        file.unlink()


OPTIONS = (
    "--kv", "--kv-tail", "--kv-sink", "--kv-skip-layers", "--executor", "--device", "--dtype", "--layers", "--threads",
    "--max-context", "--stop", "--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty", "--seed", "--kv-plan",
    "--calibration", "--balance", "--system", "--prompt", "--rank-timeout",
)  # fmt: skip


def try_words(place, data):
    word = (st.sampled_from(WORDS) | st.sampled_from(NUMBERS).map(str) | st.text(max_size=8)).filter(lambda w: "\0" not in w)
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(OPTIONS), word), min_size=1, max_size=2))
    command = data.draw(st.sampled_from(["generate", "formats", "info", "export", "plan", "words"]))
    words = [part for option, text in pairs for part in (option, text)]
    few = ("--threads", "1")
    match command:
        case "generate":
            place.generate(*words, *few)
        case "formats":
            place.run("formats", "--head-dim", pairs[0][1])
        case "info":
            place.run("info", *(["--memory", pairs[0][1]] if data.draw(st.booleans()) else [pairs[0][1]]))
        case "export":
            place.run("export", "--model", place.model, "--out", "text.txt", "--layers", pairs[0][1], "--opset", pairs[-1][1])
        case "plan":
            lists = [part for option, (_, text) in zip(["--tails", "--sinks"], pairs, strict=False) for part in (option, text)]
            place.run(
                "plan", "--model", place.model, "--text", "text.txt", "--out", "text.txt/x", "--budget", pairs[0][1], *lists
            )
        case "words":
            place.run(*(text for _, text in pairs))


def try_template(place, data):
    source = data.draw(templates)
    with limited():
        text, refusal = render_chat(source)
    assert text is not None or refusal.startswith("the chat template cannot be used: ")


def render_chat(source):
    """The text of a short conversation, or why there is none."""
    try:
        return render(source, [[{"role": "user", "content": "hi"}]], {"eos_token": "</s>"}, {})[0], ""
    except InputError as error:
        return None, str(error)


# What is tried, how often among the ordinary tests, and how often at length.
KINDS = {
    try_config: (60, 1500), try_file: (55, 1800), try_plan: (30, 900),
    try_calibration: (15, 500), try_resume: (4, 100), try_words: (40, 1200), try_template: (4, 200),
}  # fmt: skip


@pytest.mark.parametrize("examples", example_counts(KINDS))
def test_malformed_inputs_are_refused_or_taken(place, monkeypatch, examples):
    monkeypatch.chdir(place.folder)
    run_examples(place, *examples)


@pytest.mark.fuzz
@pytest.mark.parametrize("source", TEMPLATES, ids=lambda source: source[:30])
def test_no_template_takes_forever_or_much(source):
    text, refusal = render_chat(source)
    assert text is not None or refusal.startswith("the chat template cannot be used: ")
    assert len(text or "") < 2**24 + 1000
    assert not any(word in (text or "") for word in ("root:", "builtins", "<class 'os"))
