"""`tq generate`: the model's own sampling, stop texts, system messages, warnings, progress and what the cost line says."""

import json
import re

import pytest
from checkpoints import END_OF_TEXT, byte_tokenizer, saying, write_checkpoint
from gguf_files import convert
from tokenizers import AddedToken

import tq
from haarkv.models.catalog import read_config
from haarkv.models.text import load_tokenizer
from haarkv.tq_ops.errors import InputError

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "eos_token_id": 256}


@pytest.fixture
def run(run):
    return lambda folder, *args: run("generate", "--model", folder, "--prompt", "ab", "--max-new-tokens", 12, *args)


@pytest.fixture
def generate_json(run):
    """Its JSON."""
    return lambda folder, *args: run(folder, *args, "--json").json


# -- generation_config.json -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampling_model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("sampled") / "m", generation=QWEN3)


def line(err, name):
    """The cost line of that name."""
    return next(text.split(None, 1)[1].strip() for text in err.splitlines() if text.split()[:1] == [name])


def test_the_models_own_sampling_counts_and_is_said(run, generate_json, sampling_model, tmp_path):
    result = generate_json(sampling_model, "--seed", 3)
    assert {key: result["sampling"][key] for key in ("temperature", "top_k", "top_p")} == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95,
    }  # fmt: skip
    plain = write_checkpoint(tmp_path / "plain")
    explicit = ("--temperature", 0.6, "--top-k", 20, "--top-p", 0.95, "--seed", 3)
    assert generate_json(plain, *explicit)["token_ids"] == result["token_ids"]
    assert generate_json(plain, "--seed", 3)["token_ids"] != result["token_ids"]
    text = line(run(sampling_model).err, "sampling")
    assert text == "temperature 0.6, top-k 20, top-p 0.95; from the model's settings"


def test_an_explicit_option_wins(run, generate_json, sampling_model, tmp_path):
    greedy = generate_json(sampling_model, "--temperature", 0)
    assert greedy["token_ids"] == generate_json(write_checkpoint(tmp_path / "plain"))["token_ids"]
    assert line(run(sampling_model, "--temperature", 0).err, "sampling") == "greedy"
    text = line(run(sampling_model, "--top-k", 5).err, "sampling")
    assert text == "temperature 0.6, top-k 5, top-p 0.95; from the model's settings"
    assert generate_json(sampling_model, "--top-k", 0)["sampling"]["top_k"] == 0


@pytest.mark.parametrize(
    ("entries", "temperature", "top_k"),
    [({}, 0, 0), ({"do_sample": False}, 0, 0), ({"do_sample": None}, 0, 0), ({"do_sample": True}, 0.6, 3),
     ({"do_sample": True, "temperature": None}, 1, 3)],
)  # fmt: skip
def test_a_model_is_greedy_without_do_sample_and_has_temperature_1_by_it_alone(
    generate_json, tmp_path, entries, temperature, top_k
):
    folder = write_checkpoint(tmp_path / "m", generation={"temperature": 0.6, "top_k": 3, **entries})
    sampling = generate_json(folder)["sampling"]
    assert (sampling["temperature"], sampling["top_k"]) == (temperature, top_k)


def test_a_repetition_penalty_counts_for_a_greedy_model(run, generate_json, tmp_path):
    plain = write_checkpoint(tmp_path / "plain")
    folder = write_checkpoint(tmp_path / "m", generation={"repetition_penalty": 100.0})
    tokens = generate_json(folder, "--max-new-tokens", 40)["token_ids"]
    assert len(set(tokens)) == 40 > len(set(generate_json(plain, "--max-new-tokens", 40)["token_ids"]))
    assert tokens == generate_json(plain, "--repetition-penalty", 100, "--max-new-tokens", 40)["token_ids"]
    assert line(run(folder).err, "sampling") == "greedy, repetition-penalty 100; from the model's settings"


# -- Where a text ends ----------------------------------------------------------------------------------------------------

TURN_ENDS, ENDS = "<|im_end|>", 257
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ end }}\n{% endfor %}"


def hi(folder, config=None, token=TURN_ENDS, special=True, **files):
    """A model that says Hi after an a, then token 257, and then !?"""
    library = byte_tokenizer()
    (library.add_special_tokens if special else library.add_tokens)([AddedToken(token, normalized=False)])
    texts = {"tokenizer.json": library.to_str()} | {
        name: json.dumps(content) for name, content in files.pop("named", {}).items()
    }
    mutate = saying([*b"aHi", ENDS, *b"!?"])
    return write_checkpoint(folder, config={"vocab_size": 259} | (config or {}), mutate=mutate, files=texts, **files)


def generate_text(model, **options):
    return tq.load(model, kv="tq4").generate("a", chat=False, **options).texts[0]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"generation": {"eos_token_id": [256, ENDS]}}, "Hi"),
        ({"config": {"eos_token_id": ENDS}}, "Hi"),
        ({"config": {"eos_token_id": [ENDS]}, "generation": {"eos_token_id": 256}}, "Hi"),
        ({"tokenizer_config": {"eos_token": TURN_ENDS}}, "Hi"),
        ({"tokenizer_config": {"eos_token": {"content": TURN_ENDS}}, "generation": {"eos_token_id": 256}}, "Hi"),
        ({"named": {"special_tokens_map.json": {"eos_token": TURN_ENDS}}, "tokenizer_config": {"eos_token": "</s>"}}, "Hi"),
        ({"tokenizer_config": {"chat_template": TURNS.replace("end }}", "'<|im_end|>' }}")}}, "Hi"),
        ({"tokenizer_config": {"chat_template": TURNS.replace("<{{ m.role }}>", "<|im_end|>")}}, "Hi"),
        ({"tokenizer_config": {"chat_template": TURNS}}, None),
        ({"tokenizer_config": {"chat_template": "<|im_end|>{{ raise_exception('no') }}"}}, None),
        ({"token": "<|end|>", "tokenizer_config": {"chat_template": TURNS.replace("end }}", "'<|end|>' }}")}}, "Hi"),
        ({}, None),
    ],
)
def test_a_text_ends_where_any_file_says(tmp_path, files, text, special):
    """transformers stops at all ids of `generation_config`, and chats end at the tokenizer's own token as well."""
    ending = "" if special else files.get("token", TURN_ENDS)
    assert generate_text(hi(tmp_path / "m", special=special, **files)) == (text or f"Hi{ending}!?")


def in_gguf(folder, kind, end_name="<|im_end|>", template=None, **entries):
    library = byte_tokenizer()
    metadata = {"model": "gpt2", "pre": "gpt-2", "merges": ["a b"], "eos_token_id": 256} | entries
    metadata["tokens"] = [*map(library.id_to_token, range(257)), end_name, "ab", *metadata.pop("more", ())]
    metadata["token_type"] = [*[1] * 256, 3, kind, *[1] * (len(metadata["tokens"]) - 258)]
    vocabulary = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    extra = {"tokenizer.chat_template": template} if template else {}
    checkpoint = hi(folder / "m", {"vocab_size": len(metadata["tokens"])})
    return convert(checkpoint, folder / "m.gguf", extra=extra, vocabulary=vocabulary)


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize("entries", [{}, {"eos_token_id": ENDS}, {"eot_token_id": ENDS}])
def test_a_gguf_file_ends_where_llama_cpp_ends(tmp_path, kind, entries):
    """By the file's ids or a known name, whatever kind it has; and a template spells it as one token."""
    path = in_gguf(tmp_path, kind, **entries)
    assert generate_text(path) == "Hi"
    assert load_tokenizer(path, read_config(path)).encode("H<|im_end|>") == [ord("H"), ENDS]


@pytest.mark.parametrize(
    ("end_name", "more", "template", "text"),
    [
        ("<|other|>", (), None, "Hi!?"),
        ("<|other|>", (), TURNS.replace("end }}", "'<|other|>' }}"), "Hi"),
        ("<|end|>", (), None, "Hi"),
        ("<|end|>", ("<|return|>",), None, "Hi"),
        ("<|end|>", ("<|return|>", "<|call|>"), None, "Hi!?"),
        ("<|end|>", ("<|return|>", "<|call|>"), TURNS.replace("end }}", "'<|end|>' }}"), "Hi!?"),
    ],
)
def test_a_name_that_ends_a_part_of_an_answer_does_not_end_it(tmp_path, end_name, more, template, text):
    """As in llama.cpp: beside <|return|> and <|call|>, <|end|> closes what a model thinks."""
    assert generate_text(in_gguf(tmp_path, 3, end_name, template, more=more)) == text


def test_a_row_that_a_gguf_file_fills_up_with_is_no_token(tmp_path):
    path = in_gguf(tmp_path, 3, more=("[PAD259]", "[PAD0]"))
    assert load_tokenizer(path, read_config(path)).unused_ids == (259,)


# -- Stop texts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory):
    """Continues `ab` with cdef…z."""
    return write_checkpoint(tmp_path_factory.mktemp("alphabet") / "m", mutate=saying("abcdefghijklmnopqrstuvwxyz"))


@pytest.mark.parametrize(
    ("stops", "text", "finish"),
    [
        (["f"], "cde", "stop"),
        (["ef"], "cd", "stop"),
        (["xyz", "fgh", "gh"], "cde", "stop"),
        (["cd"], "", "stop"),
        (["mnop"], "cdefghijklmn", "length"),  # begun, and not finished
        (["mn"], "cdefghijkl", "stop"),  # with the last token
        (["no"], "cdefghijklmn", "length"),
    ],
)
def test_a_text_ends_before_the_stop(run, generate_json, alphabet, stops, text, finish):
    args = [arg for stop in stops for arg in ("--stop", stop)]
    result = generate_json(alphabet, *args)
    assert (result["text"], result["finish"]) == (text, finish)
    assert run(alphabet, *args).out == text + "\n"


@pytest.mark.parametrize(("value", "text"), [(True, "c"), (1, "cdef"), ("yes", "cdef"), (None, "cdef")])
def test_on_token_ends_a_text_by_true_alone(alphabet, value, text):
    assert tq.load(alphabet).generate("ab", max_new_tokens=4, on_token=lambda *_: value).texts == [text]


# -- Arguments of the template --------------------------------------------------------------------------------------------

THINKING_TEMPLATE = "{{ messages[-1].content }}{% if enable_thinking is defined %}{{ enable_thinking | tojson }}{% endif %}"


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("switched") / "m"
    return write_checkpoint(folder, tokenizer_config={"chat_template": THINKING_TEMPLATE})


@pytest.mark.parametrize(
    ("argument", "value", "suffix"),
    [("false", False, "false"), ('"x"', "x", '"x"'), ("no", "no", '"no"'), ("[1, 2]", [1, 2], "[1, 2]"), ("", "", '""')],
)
def test_arguments_reach_the_template_by_every_way(generate_json, thinking_model, argument, value, suffix):
    tokens = len(f"ab{suffix}")
    assert generate_json(thinking_model, "--template-arg", f"enable_thinking={argument}")["prompt_tokens"] == tokens
    session, arguments = tq.load(thinking_model), {"enable_thinking": value}
    assert session.encode(["ab"], template_args=arguments) == [[*f"ab{suffix}".encode()]]
    stream = session.stream("ab", max_new_tokens=1, template_args=arguments)
    list(stream)
    assert stream.result.completions[0].prompt_tokens == tokens


def test_an_argument_that_is_no_json_is_refused(thinking_model):
    for arguments in ({"enable_thinking": {1}}, {3: 4}, [3], {"add_generation_prompt": False}):
        with pytest.raises(InputError, match="argument"):
            tq.load(thinking_model).encode(["ab"], template_args=arguments)


def test_what_a_prompt_spells_is_text_in_a_template_unless_asked_otherwise(generate_json, thinking_model):
    prompt = f"c{END_OF_TEXT}"
    for options, tokens in (((), len(prompt)), (("--parse-special",), 2), (("--no-chat",), 2)):
        result = generate_json(thinking_model, "--prompt", prompt, *options)
        assert result["completions"][1]["prompt_tokens"] == tokens


# -- Stored caches ----------------------------------------------------------------------------------------------------------


def test_a_stored_cache_goes_on(run, generate_json, alphabet):
    run(alphabet, "--save-cache", "c").ended()
    again = generate_json(alphabet, "--load-cache", "c")
    assert (again["text"], again["reused_tokens"]) == ("cdefghijklmn", 1)


# -- Warnings and cost ----------------------------------------------------------------------------------------------------


def test_a_text_that_the_context_will_cut_is_announced(run, generate_json, alphabet):
    ran = run(alphabet, "--max-context", 5)
    assert ran.ended() == "cdef\n"
    assert ran.err.startswith("tq: warning: the context ends after 4 of 12 new tokens: ")
    assert "raise --max-context" in ran.err.splitlines()[0]
    assert len(generate_json(alphabet, "--max-context", 5)["token_ids"]) == 4
    # The last token is predicted and never stored.
    assert "warning" not in run(alphabet, "--max-context", 13).err
    assert "warning" in run(alphabet, "--max-context", 12).err
    run(alphabet, "--prompt", "x" * 1020).notes("after 5 of 12 new tokens", "shorten the prompt or lower --max-new-tokens")


def test_the_cost_names_the_executor_and_tokens_a_second(run, alphabet):
    err = run(alphabet).err
    assert line(err, "executor").startswith("reference (cpu cannot run this: ")
    assert re.fullmatch(r"2 tokens in [\d.,]+ m?s, [\d.,]+ tokens/s", line(err, "prompt"))
    assert re.fullmatch(r"12 tokens, [\d.]+ ms a decode step, [\d.,]+ tokens/s \(length\)", line(err, "new"))


def test_progress_counts_every_prompt_token(alphabet):
    calls = []
    tq.load(alphabet).generate(["a" * 700, "b" * 30], max_new_tokens=1, on_prefill=lambda *at: calls.append(at))
    assert calls == [(0, 730), (542, 730), (730, 730)]
