"""Inputs such as people bring: prompts, names of models, configs, chat templates, options (`public_inputs.json`).

Each has its right answer from elsewhere: transformers, the bytes of the text, or the same model by its plain name. An input
that is refused is refused in one line. A fifth of them are among the ordinary tests, the rest runs with `make fuzz`.
"""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from at_length import rest
from checkpoints import CONFIG, byte_tokenizer
from fuzzing import Place, limited

import tq as public
from haarkv.engine.generation import prefill_in_chunks
from haarkv.tq_ops.errors import InputError
from tq.cli import main

INPUTS = json.loads((Path(__file__).parent / "public_inputs.json").read_text(encoding="ascii"))
IDS = list(b"for spam in eggs: print(spam)")
SAME = {"m", "./m", "m/", "m//", "m/.", "./m/../m", "link", "with space", "\u00fcn\u00ef c\u00f8d\u00e9", "m.gguf.d", "-m"}
"""Names of one model."""
TURNS = (
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": "a\nb"}],
    [
        {"role": "user", "content": "1"}, {"role": "assistant", "content": "<think>x</think>\n2"},
        {"role": "user", "content": "3 "},
    ],
)  # fmt: skip


def fifth(kind):
    return rest(pytest.mark.fuzz, INPUTS[kind], lambda index, _: index % 5 == 0)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint `m`, by several names, a copy of it that stays whole, and other things that are no model."""
    place = Place(tmp_path_factory.mktemp("public"))
    for name in SAME - {"link"}:
        if not (place.folder / name).exists():
            shutil.copytree(place.whole, place.folder / name)
    (place.folder / "link").symlink_to(place.whole)
    (place.folder / "empty").mkdir()
    (place.folder / "empty.gguf").touch()
    return place


@pytest.fixture(scope="module")
def session(place):
    return public.load(place.whole, kv="tq4")


def generated(*args):
    """The text of `tq generate`, or None where it refuses in one line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limited():
        code = main(["generate", "--kv", "tq4", "--no-chat", "--json", *args])
    if not code:
        return json.loads(out.getvalue())["text"]
    assert (code, out.getvalue(), err.getvalue().count("\n")) == (2, "", 1), err.getvalue()
    return None


@pytest.mark.parametrize("text", fifth("prompts"), ids=ascii)
def test_a_prompt_is_its_bytes(place, session, text):
    assert session.encode([text], chat=False) == [list(text.encode())]
    (wrapped,) = session.encode([text])
    assert bytes(wrapped).decode() == f"[user]{text}"
    assert session.tokenizer.decode(list(text.encode())) == text
    if "\0" not in text and len(text) < 400:  # what a command line can hold, and answers soon
        ours = generated("-m", str(place.whole), "--temperature", "0", "--max-new-tokens", "3", f"--prompt={text}")
        right = session.generate([text], max_new_tokens=3, chat=False, temperature=0).texts[0]
        assert ours == right or (ours is None and not text.strip())


@pytest.mark.parametrize("name", fifth("names"), ids=ascii)
def test_a_name_is_the_model_or_refused(place, session, monkeypatch, name):
    monkeypatch.chdir(place.folder)
    ours = generated("--model", name, "--temperature", "0", "--max-new-tokens", "4", "-p", "ab")
    if name in SAME:
        assert ours == session.generate(["ab"], max_new_tokens=4, temperature=0, chat=False).texts[0]
    else:
        assert ours is None


@pytest.mark.parametrize("edit", fifth("configs"), ids=lambda edit: json.dumps(edit)[:70])
def test_a_config_means_what_it_means_to_transformers_or_is_refused(place, edit):
    place.put("config.json", json.dumps({**CONFIG, **edit}))
    try:
        ours = logits_of(place.model)
    except InputError as error:
        ours = str(error)
    if isinstance(ours, str):
        assert "\n" not in ours
        assert place.generate() == 2
        place.restore("config.json")
        return
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            place.model, dtype=torch.float32, attn_implementation="eager"
        )
        right = theirs(torch.tensor([IDS])).logits[0].detach()
    except Exception:  # it refuses such an entry, each in its own way: to us it says nothing
        right = logits_of(place.whole)
    finally:
        place.restore("config.json")
    assert (ours - right).abs().max() < 2e-3 * right.abs().max()


def logits_of(folder):
    """Logits [T, V] of `IDS`, over a cache in FP32."""
    session = public.load(folder, kv="fp32", executor="reference", balance=False)
    rows = []
    for end in range(1, len(IDS) + 1):
        cache, paging = session.new_cache(1, len(IDS))
        rows.append(prefill_in_chunks(session.executor, [IDS[:end]], [paging.add()], paging, cache, 64, None))
    return torch.cat(rows)


@pytest.mark.parametrize("settings", fifth("tokenizer_configs"), ids=lambda settings: json.dumps(settings)[:70])
def test_a_template_is_rendered_as_transformers_does_or_refused(place, settings):
    place.put("tokenizer_config.json", json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}))
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(place.model)
        for turns in TURNS:
            ours, refusal = encoded(place.model, turns)
            assert "\n" not in refusal
            if "chat template" in refusal and "cannot be used" not in refusal:
                continue  # there is none, or of several none for this; or a system message would be lost in silence
            try:
                right = theirs.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            except Exception:  # whatever jinja raises
                right = None
            assert ours == (None if right is None else byte_tokenizer().encode(right, add_special_tokens=False).ids)
    finally:
        place.restore("tokenizer_config.json")


def encoded(folder, turns):
    """Token ids of a conversation, or None and why there are none."""
    try:
        return public.load(folder, kv="tq4").tokenizer.encode_chat([turns])[0], ""
    except InputError as error:
        return None, str(error)


@pytest.mark.parametrize("options", fifth("greedy"))
def test_options_that_are_greedy_give_the_greedy_text(place, session, options):
    ours = generated("-m", str(place.whole), "-p", "ab", "--max-new-tokens", "8", *options.split())
    assert ours == session.generate(["ab"], max_new_tokens=8, temperature=0, chat=False).texts[0]


@pytest.mark.parametrize("options", fifth("refused"))
def test_options_that_cannot_be_are_refused(place, options):
    assert place.generate("--kv", "tq4", *(word.strip("'") for word in options.split())) == 2
