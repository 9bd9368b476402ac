"""Options mean and read the same in every command, and every public name is explained."""

import io
import pydoc
import re
import subprocess
import sys

import click
import pytest
from commands import every_command
from refusals import assert_refused

import tq
from tq.groups import option_section

# In this order wherever they stand together.
ORDER = (
    "--model", "--prompt", "--prompt-file", "--prompt-tokens", "--kv", "--kv-tail", "--kv-sink", "--kv-skip-layers",
    "--kv-plan", "--executor", "--device", "--dtype", "--layers", "--threads", "--json",
)  # fmt: skip


COMMANDS = dict(every_command())


def options(command):
    return [p for p in command.params if isinstance(p, click.Option) and not p.hidden]


@pytest.mark.parametrize("name", COMMANDS)
def test_options_stand_in_one_order(name):
    shared = [option.opts[0] for option in options(COMMANDS[name]) if option.opts[0] in ORDER]
    assert shared == sorted(shared, key=ORDER.index)


LONG = [name for name, command in COMMANDS.items() if len(options(command)) > 12]


@pytest.mark.parametrize("name", LONG)
def test_a_long_list_of_options_stands_under_headings(run, name):
    sections = {option.opts[0]: option_section(option) for option in options(COMMANDS[name])}
    assert [option for option, section in sections.items() if not section] == []
    help_text = run(*name.split(), "--help").ended()
    for option, section in sections.items():
        *_, place = (hit.start() for hit in re.finditer(rf"^ +(-\w, )?{option}\b", help_text, re.MULTILINE))
        above = re.findall(r"^([A-Z][A-Za-z ]+):$", help_text[:place], re.MULTILINE)
        assert above[-1] == section, option


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_and_command_is_explained(name):
    assert COMMANDS[name].help
    for option in options(COMMANDS[name]):
        if option.opts[0] not in ("--max-new-tokens", "--seed"):  # which say it all by name and default
            assert option.help or option.show_default, f"{option.opts[0]} of {name}"


def test_help_says_all_that_names_a_model():
    texts = [
        option.help for name, command in COMMANDS.items() for option in options(command)
        if option.opts[0] == "--model" and (name, "--model") != ("dev self-test", "--model")
    ]  # fmt: skip
    texts += [COMMANDS["info"].help, tq.load.__doc__]
    assert len(texts) > 6
    for text in texts:
        assert all(word in " ".join(text.split()) for word in ("tiny", "random:SIZE", "~", "Hub id")), text


# -- What is wrong in one is wrong in all -----------------------------------------------------------------------------------

WRONG = {
    "--model": ("nothing/here", "no such model"), "--kv": ("tq9", "tq9"),
    "--kv-plan": ("absent.json", "absent.json"), "--calibration": ("absent", "absent"), "--executor": ("abacus", "abacus"),
    "--device": ("moon", "moon"), "--dtype": ("int3", "int3"), "--layers": ("x", "--layers"),
    "--threads": ("99999", "processors"), "--text": ("absent.txt", "No such file"),
    "--verify": ("absent.txt", "No such file"), "--window": ("0", "--window"),
    "--prompt-file": ("absent.txt", "No such file"), "--out": ("absent/x", "absent"),
    "--resume": ("absent/x", "does not exist"),
}  # fmt: skip
REQUIRED_ARGS = {
    "diff": ("--a", "tq4", "--b", "bf16"), "eval": ("--text", "text.txt"),
    "calibrate": ("--text", "text.txt", "--out", "x"), "plan": ("--text", "text.txt", "--out", "x", "--budget", "4"),
    "export": ("--out", "x"), "generate": ("--prompt", "a"),
    "quantize": ("tiny", "--out", "x.gguf"), "choice export": ("x",), "choice import": ("x",),
}  # fmt: skip
"""What a command would lack."""
ELSEWHERE = {"serve", "dev replay", "dev bringup", "dev self-test"}
"""They want a file, ask vLLM, or say what they found before: each has tests of its own."""
OPTION_CASES = [
    (name, option.opts[0])
    for name, command in COMMANDS.items()
    for option in options(command)
    if name not in ELSEWHERE and option.opts[0] in WRONG
]


@pytest.mark.parametrize(("name", "option"), OPTION_CASES)
def test_a_wrong_value_is_refused_in_one_line_by_every_command(run, monkeypatch, tmp_path, name, option):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    (tmp_path / "text.txt").write_text("for spam in eggs:\n    print(spam)\n" * 40, encoding="utf-8")
    value, word = WRONG[option]
    assert_refused(run(*name.split(), *REQUIRED_ARGS.get(name, ()), option, value), word)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


# -- import tq ------------------------------------------------------------------------------------------------------------


def test_help_shows_every_public_name_with_a_line_of_its_own():
    pytest.importorskip("transformers")
    help_text = pydoc.render_doc(tq, renderer=pydoc.plaintext)
    purposes = {
        line.split()[0]: line.split(None, 1)[1] for line in tq.__doc__.splitlines() if line.endswith(".") and "  " in line
    }
    assert purposes.keys() == {*tq.__all__, "TQCache", "generate", "calibrate"} == set(tq._PUBLIC)
    for name, purpose in purposes.items():
        assert name in dir(tq)
        assert getattr(tq, name) is not None
        assert f"{name} " in help_text
        assert purpose in help_text
    # Classes and functions with their own help, too.
    for name in ("Session", "KVSpec", "load"):
        assert getattr(tq, name).__doc__.splitlines()[0] in help_text


def test_help_works_without_transformers_and_what_needs_them_says_so():
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'transformers' else find(name, *rest)\n"
        "import pydoc, tq\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
        "sys.modules['transformers'] = None\n"
        "shown = pydoc.render_doc(tq, renderer=pydoc.plaintext)\n"
        "print('PagedKVCache' in dir(tq), 'TQCache' in dir(tq), 'class Session' in shown)\n"
        "for name in ('TQCache', 'generate', 'calibrate'):\n"
        "    try:\n"
        "        getattr(tq, name)\n"
        "    except tq.InputError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    missing = "needs transformers, which is not installed; run pip install 'haarkv[hf]'"
    errors = [f"tq.{name} {missing}" for name in ("TQCache", "generate", "calibrate")]
    assert done.stdout.splitlines() == ["True False True", *errors], done.stderr
