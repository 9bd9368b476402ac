"""Commands run on malformed input: each is taken, or refused in one line with exit code 2, and changes nothing."""

import io
import resource
import signal
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from refusals import snapshot

from tq.cli import main

LIMIT_S = 60
MOST_GROWTH = 2**20  # KiB of resident memory
TEXT = "for spam in eggs:\n    print(spam, 'and', eggs)\n"
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


class HangError(BaseException):
    """It takes longer than anything here should."""


@contextmanager
def taking_at_most(count):
    """Let this process allocate no more than this many bytes, and touch no more; Linux alone says how many it did."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is what there is now
    before = memory("VmRSS")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert memory("VmHWM") - before < count


def memory(name):
    """Bytes of this process, as Linux calls them."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@contextmanager
def limited(seconds=LIMIT_S):
    def stop(*_):
        raise HangError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


BEFORE = ("tq: choosing a KV cache for this model", "tq: warning: ")
"""How lines begin that may come before a refusal: what is wrong with weights is only seen once a model is read."""


def assert_one_line(message):
    assert message.startswith("tq: ")
    assert message.endswith("\n")
    assert message[:-1].isprintable(), message
    assert len(message) < 2200
    assert "fault of tq itself" not in message
    assert "not enough memory" not in message


class Place:
    """A folder with a checkpoint, a text and more, to run commands in."""

    def __init__(self, folder):
        self.folder, self.model = folder, folder / "m"
        write_checkpoint(self.model, generation={"do_sample": True, "temperature": 0.7, "top_k": 20, "eos_token_id": 256},
                         tokenizer_config={"chat_template": TEMPLATE, "eos_token": {"content": "<|endoftext|>"}})  # fmt: skip
        write_checkpoint(folder / "sharded", shards=2)
        (folder / "text.txt").write_text(TEXT * 3, encoding="utf-8")
        self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def run(self, *args, code=(0, 2)):
        """Run a command that must be taken or refused, and change nothing."""
        before, out, err = snapshot(self.folder), io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), limited():
            exit_code = main([str(arg) for arg in args])
        assert snapshot(self.folder) == before, args
        assert exit_code in code, (args, err.getvalue())
        if exit_code == 2:
            assert not out.getvalue()
            *notes, refusal = err.getvalue().splitlines(keepends=True)
            assert all(line.startswith(BEFORE) for line in notes), notes
            assert_one_line(refusal)
        assert "Traceback" not in err.getvalue()
        growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.peak
        assert growth < MOST_GROWTH, (args, growth)
        return exit_code

    def generate(self, *args, model=None):
        return self.run("generate", "--model", model or self.model, "--prompt", "a", "--max-new-tokens", 1, "--no-chat", *args)


def example_counts(kinds):
    """(what is tried, how many, always the same ones): a few among the ordinary tests, many with `make fuzz`."""
    return [
        pytest.param((kind, count, not marks), id=f"{kind.__name__} {count}", marks=marks)
        for kind, counts in kinds.items() for count, marks in zip(counts, ((), pytest.mark.fuzz), strict=True)
    ]  # fmt: skip


def run_examples(place, kind, count, derandomize):
    @settings(
        max_examples=count, derandomize=derandomize, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck), print_blob=True,
    )  # fmt: skip
    @given(st.data())
    def run(data):
        kind(place, data)

    run()
