"""Malformed GGUF files: one line and exit code 2, no hang, and no more memory than a few times the file.

Small files, a few hundred among the ordinary tests and thousands with `make fuzz`; with `--real FOLDER` the headers of
pretrained ones too, their weights a hole in the file.
"""

import resource
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import byte_tokenizer, write_checkpoint
from fuzzing import TEMPLATE, Place, taking_at_most, tried
from gguf_files import convert
from gguf_parts import MUST_BE_REFUSED, lying, odd, parse
from hypothesis import assume
from hypothesis import strategies as st
from mutations import damaged

from tq.cli import main

ROOM = 2**26
"""Bytes beside a few times the file: what a command takes for a good file of this size, and what malloc keeps."""
TIMES = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    made = Place(folder)
    write_checkpoint(folder / "heads", config={"head_dim": 64})  # which the CPU's kernels take
    tokens = sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])
    words = {"model": "gpt2", "pre": "gpt-2", "tokens": [token for token, _ in tokens], "token_type": [1] * len(tokens),
             "merges": ["a b"], "eos_token_id": len(tokens) - 1}  # fmt: skip
    words["tokens"][1] = "ab"
    words = {f"tokenizer.ggml.{key}": value for key, value in words.items()} | {"tokenizer.chat_template": TEMPLATE}
    made.content = convert(folder / "heads", folder / "whole.gguf", "Q8_0", vocabulary=words).read_bytes()
    made.parts = parse(made.content)
    assert made.parts.dump() == made.content
    for command in (["info", folder / "whole.gguf"], ["generate", "--model", folder / "whole.gguf", "--prompt", "a"]):
        assert main([*map(str, command)]) == 0  # what is loaded once is not the file's
    return made


def read(place, content, *, told=(0, 2), loaded=(0, 2)):
    """Tell of a file and load it; exit codes that may be. A name of its own: files are remembered by name, size and time."""
    place.number = getattr(place, "number", 0) + 1
    file = place.folder / f"m{place.number}.gguf"
    file.write_bytes(content)
    try:
        with taking_at_most(ROOM + TIMES * len(content)):
            place.run("info", file, code=told)
            # A scale of a block that was changed makes channels uneven, which is a warning beside whatever else is said.
            place.run("generate", "--model", file, "--prompt", "a", "--max-new-tokens", 1, "--no-chat", "--balance", "off",
                      code=loaded)  # fmt: skip
    finally:
        file.unlink()


def try_lie(place, data):
    which, content = data.draw(lying(place.parts))
    read(place, content, told=(0, 2) if which == "vocabulary" else (2,), loaded=(2,))


def try_odd(place, data):
    read(place, data.draw(odd(place.parts)))


def try_damaged(place, data):
    head = data.draw(st.sampled_from([60, 1000, 9000]))
    read(place, data.draw(damaged(place.content, head=head)))


KINDS = {try_lie: (80, 3500), try_odd: (25, 1000), try_damaged: (15, 1000)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_some_malformed_files_are_refused_in_one_line(place, kind):
    tried(place, kind, KINDS[kind][0], derandomize=True)


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_thousands_of_malformed_files_are_refused_in_one_line(place, kind):
    tried(place, kind, KINDS[kind][1], derandomize=False)


@pytest.mark.fuzz
def test_headers_of_pretrained_files_are_refused_in_one_line(place, pytestconfig):
    """The same lies in headers with a whole vocabulary; info reads no weights, and the file is a hole where they lie."""
    files = sorted(Path(folder).glob("*.gguf")) if (folder := pytestconfig.getoption("--real")) else []
    if not files:
        pytest.skip("needs pretrained files: make fuzz REAL=FOLDER")
    for file in files:
        with file.open("rb") as begin:
            whole = parse(begin.read(2**25))
        parts, size = replace(whole, data=b""), file.stat().st_size
        header = len(parts.dump())
        place.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        def lie(place, data, parts=parts, size=size, header=header):
            which, wrong = data.draw(lying(parts, MUST_BE_REFUSED[1:]))  # all but a cut
            assume(which not in ("vocabulary", "not_text"))
            place.number = getattr(place, "number", 0) + 1
            path = place.folder / f"m{place.number}.gguf"
            with path.open("wb") as out:
                out.write(wrong)
                out.truncate(size)
            try:
                with taking_at_most(ROOM + TIMES * header):
                    place.run("info", path, code=(2,))
            finally:
                path.unlink()

        tried(place, lie, 150, derandomize=False)
