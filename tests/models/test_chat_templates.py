"""Chat templates render as in transformers."""

from __future__ import annotations

import re

import pytest

from haarkv.models.limited import render
from haarkv.tq_ops.errors import InputError

CONVERSATION = [
    {"role": "system", "content": "Say <b> & 'é'."},
    {"role": "user", "content": "a<b & 'é' \n\"x\""},
]
LOOP = "{% for m in messages %}"
TEMPLATES = {
    "no tools": "{% if tools is not none %}[TOOLS]{% endif %}{% if documents is none %}-{% endif %}{{ messages[1].content }}",
    "tools defined": "{{ tools is defined }} {{ documents is defined }} {{ nothing is defined }}",
    "json": LOOP + "{{ m | tojson }}{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}",
    "json laid out": "{{ messages | tojson(indent=2, sort_keys=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "a date": "{{ strftime_now('%Y') }}",
    "generation": LOOP + "{% generation %}{{ m.role }}: {{ m.content }}\n{% endgeneration %}{% endfor %}",
    "generation's scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "loop controls": LOOP + "{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}{{ eos_token }}",
    "namespace": "{% set n = namespace(a=0) %}" + LOOP + "{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }} {{ dict(b=1).b }}",
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_renders_as_in_transformers(source):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    special = {"eos_token": "</s>"}
    expected, _ = utils.render_jinja_template([CONVERSATION], chat_template=source, add_generation_prompt=True, **special)
    assert render(source, [CONVERSATION], special) == expected


def test_what_a_template_refuses_is_said_in_its_words():
    with pytest.raises(InputError, match=re.escape("cannot be used: no tools here; --no-chat goes without it")):
        render("{% if not tools %}{{ raise_exception('no tools here') }}{% endif %}", [CONVERSATION], {})
