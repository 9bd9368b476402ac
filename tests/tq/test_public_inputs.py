"""Configs and chat templates such as people bring (`public_inputs.json`): what transformers makes of them, or one line.

A fifth of them are among the ordinary tests, the rest runs with `make fuzz`.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from at_length import rest
from checkpoints import CONFIG, byte_tokenizer
from fuzzing import Place

import tq as public
from haarkv.engine.generation import prefill_in_chunks
from haarkv.tq_ops.errors import InputError

INPUTS = json.loads((Path(__file__).parent / "public_inputs.json").read_text(encoding="ascii"))
IDS = list(b"for spam in eggs: print(spam)")
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
    return Place(tmp_path_factory.mktemp("public"))


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
