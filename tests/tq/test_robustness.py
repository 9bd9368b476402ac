"""What would make a program crash, hang, or take all memory, is refused in one line; other errors become one line as well."""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints import byte_tokenizer, saying, write_checkpoint
from mutations import TEMPLATES
from refusals import assert_refused
from safetensors import safe_open
from tokenizers import Regex, pre_tokenizers

import tq as public
from haarkv.models import templates
from haarkv.models.catalog import read_config
from haarkv.models.templates import render
from haarkv.models.text import load_tokenizer
from haarkv.tq_ops.errors import InputError
from tq.commands import info as info_commands


@pytest.fixture
def generate(run):
    return lambda model, *args: run("generate", "--model", model, "--prompt", "a", "--max-new-tokens", 1, *args)


@pytest.fixture
def copy_without(checkpoint, tmp_path):
    """A checkpoint to change: its files are links to those of the whole one."""
    return lambda name: shutil.copytree(
        checkpoint, tmp_path / "copied", ignore=shutil.ignore_patterns(name), copy_function=os.link
    )


# -- Files that are none --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_in_a_model_is_not_waited_for(generate, copy_without, name):
    folder = copy_without(name)
    os.mkfifo(folder / name)
    assert_refused(generate(folder), name, "not a regular file")


@pytest.mark.parametrize("option", ["--kv-plan", "--calibration"])
def test_a_pipe_or_a_device_is_no_plan(generate, checkpoint, tmp_path, option):
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", "/dev/zero"):
        assert_refused(generate(checkpoint, option, file), file, "not a regular file")


def test_a_text_without_end_is_refused(generate, checkpoint, monkeypatch):
    monkeypatch.setattr("tq.commands.generate._MOST_TEXT", 1000)
    assert_refused(generate(checkpoint, "--prompt-file", "/dev/zero"), "/dev/zero has more than 1,000 bytes")


@pytest.mark.parametrize("shard", ["../whole/model.safetensors", "/etc/passwd", "..", "", "a/../../b"])
def test_an_index_leads_nowhere_but_into_its_folder(generate, copy_without, checkpoint, shard):
    folder = copy_without("model.safetensors")
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        names = dict.fromkeys(file.keys(), shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert_refused(generate(folder), "index.json", "the model's own folder")


def test_a_header_of_gigabytes_is_not_read(generate, copy_without):
    folder = copy_without("model.safetensors")
    with (folder / "model.safetensors").open("wb") as file:
        file.write((2**31).to_bytes(8, "little") + b'{"')
        file.truncate(3 * 2**30)  # without a block on the disk
    assert_refused(generate(folder), "header too large")


# -- Numbers --------------------------------------------------------------------------------------------------------------


def test_a_cache_that_no_machine_holds_is_refused_before_it_is_allocated(checkpoint, monkeypatch):
    session = public.load(checkpoint)
    monkeypatch.setattr("haarkv.tq_ops.memory.available_memory", lambda: 10**6)
    with pytest.raises(InputError, match=r"a KV cache for 9 sequences of 1,000 tokens would take .* GiB, and 0\.0 are free;"):
        session.new_cache(9, 1000)
    session.new_cache(1, 1000)
    with pytest.raises(InputError, match=r"random:0\.6b \(2\.22 weights .* would take 2\.\d GiB"):
        public.load("random:0.6b")


# -- What ends a command --------------------------------------------------------------------------------------------------


def failing(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(info_commands, "print_table", fail)


class PanicError(BaseException):
    """Stands for what a library of Rust raises, which is no Exception."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ZeroDivisionError("division\nby \x1b[31mzero"), ["fault of tq itself: ZeroDivisionError: division by \\x1b[31mzero"]),
        (PanicError("index out of bounds"), ["fault of tq itself: PanicError: index out of bounds", "tq --debug"]),
        (RecursionError("deep"), ["fault of tq itself: RecursionError"]),
        (MemoryError(), ["not enough memory"]),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), ["not enough memory"]),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), ["not enough memory"]),
        (OSError(28, "No space left on device", "file"), ["file: No space left on device"]),
        (InputError("a" * 10_000), ["aaa …"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_goes_wrong_is_one_line(run, monkeypatch, error, words):
    failing(monkeypatch, error)
    assert_refused(run("formats"), *words)


def test_debug_shows_where_it_went_wrong(run, monkeypatch):
    failing(monkeypatch, ZeroDivisionError("by zero"))
    ran = run("--debug", "formats")
    assert (ran.code, "in fail" in ran.err) == (2, True)
    assert ran.err.startswith("Traceback (most recent call last):")
    assert ran.err.splitlines()[-1].startswith("tq: this is a fault of tq itself: ZeroDivisionError: by zero")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")  # noqa: PTH110
@pytest.mark.parametrize(
    ("script", "code", "words"),
    [("generate --prompt a --max-new-tokens 20000 --kv bf16 --model m | head -c 5 > /dev/null; exit ${PIPESTATUS[0]}", 0, ""),
     ("formats | head -c 1 > /dev/null; exit ${PIPESTATUS[0]}", 0, ""), ("formats 2>/dev/full >/dev/null", 0, ""),
     ("bogus 2>/dev/full", 2, ""), ("bogus 2>&-", 2, ""), ("formats --json > /dev/full", 2, "tq: No space left on device\n")],
)  # fmt: skip
def test_streams_that_fail_are_said_once_at_most(tmp_path, script, code, words):
    """Output is buffered as it is for users: what is left at exit is where it goes wrong. The model never stops of itself."""
    write_checkpoint(tmp_path / "m", config={"max_position_embeddings": 30_000}, mutate=saying("ab", endless=True))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = ["bash", "-c", f"{sys.executable} -m tq {script}"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (code, words)


# -- Templates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", TEMPLATES[1:4] + TEMPLATES[7:8], ids=lambda source: source[:20])
def test_a_template_cannot_take_all_memory_or_break_the_parser(source):
    with pytest.raises(InputError, match=r"the chat template cannot be used: (it takes more than|maximum recursion|too many)"):
        render(source, [[{"role": "user", "content": "hi"}]], {}, {})


def test_a_template_ends_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr("haarkv.models.templates._WAITS", 0.1)
    with pytest.raises(InputError, match="it takes more than 10 s or 512 MiB"):
        render(TEMPLATES[0], [[{"role": "user", "content": "hi"}]], {}, {})


# -- Tokenizers -----------------------------------------------------------------------------------------------------------


def test_a_regular_expression_that_breaks_down_is_one_line(tmp_path):
    """Its library gives up by a panic, which is no exception that one could catch."""
    library = byte_tokenizer()
    cut = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([cut, library.pre_tokenizer])
    folder = write_checkpoint(tmp_path / "m", files={"tokenizer.json": library.to_str()})
    tokenizer = load_tokenizer(folder, read_config(folder))
    with pytest.raises(InputError, match=r"tokenizer\.json cannot be used: its regular expression fails on this text"):
        tokenizer.encode("a" * 40 + "b")
    assert tokenizer.decode(tokenizer.encode("spam")) == "spam"


# -- Threads and processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["onnx", "cpu"])
def test_threads_share_a_session(executor):
    if executor == "onnx":
        pytest.importorskip("onnxruntime")
    session = public.load("tiny", executor=executor)
    prompts = ["def main(", "import os", "class A"]

    def texts(prompt):
        return session.generate(prompt, max_new_tokens=4).texts

    alone = [texts(prompt) for prompt in prompts]
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(texts, prompts * 2)) == alone * 2


def test_a_forked_process_is_told_to_load_its_own(checkpoint):
    session = public.load(checkpoint)
    reads, writes = os.pipe()
    process = os.fork()
    if not process:
        try:
            session.generate("a", max_new_tokens=1)
        except InputError as error:
            os.write(writes, str(error).encode())
        os._exit(0)
    os.close(writes)
    os.waitpid(process, 0)
    with os.fdopen(reads) as pipe:
        assert "forked after the model was loaded" in pipe.read()
    assert session.generate("a", max_new_tokens=1).texts


def worker_of_a_request(source="{{ messages[0].content }}!"):
    """Which process answers, and the seconds that it has computed."""
    assert render(source, [[{"role": "user", "content": "hi"}]], {}, {}) == ["hi!"]
    process = templates._RUNNING[os.getpid()].pid
    ticks = (Path("/proc") / str(process) / "stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return process, sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def test_one_process_answers_until_it_has_to_be_ended():
    first, _ = worker_of_a_request()
    assert os.getpgid(first) != os.getpgid(0)  # Ctrl-C ends what the user sees, and not what answers the next request
    with pytest.raises(InputError, match="has no element 9"):
        render("{{ messages[9].content.x }}", [[{"role": "user", "content": "hi"}]], {}, {})
    assert worker_of_a_request()[0] == first
    os.kill(first, signal.SIGKILL)
    with pytest.raises(InputError, match="it takes more than"):
        render("a", [[]], {}, {})
    assert worker_of_a_request()[0] != first


def test_each_request_has_its_own_time(monkeypatch):
    """The system counts what a process has computed from its beginning."""
    monkeypatch.setattr(templates, "_RUNNING", {})
    busy = "{% for a in range(300) %}{% for b in range(9000) %}{% endfor %}{% endfor %}{{ messages[0].content }}!"
    workers = [worker_of_a_request(busy) for _ in range(3)]
    limits = (Path("/proc") / str(workers[0][0]) / "limits").read_text()
    soft = int(next(line for line in limits.splitlines() if line.startswith("Max cpu time")).split()[3])
    assert templates.template_worker.MOST_S < soft <= workers[2][1] + templates.template_worker.MOST_S + 1
