"""Child processes of the serving benchmark: started in groups of their own, asked over the loopback, ended without orphans.

Run as a program, this is vLLM's own benchmark client, kept loaded: a round of requests for each line of arguments on stdin,
and a JSON line each; what it prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from haarkv.tq_ops.errors import InputError

# vLLM looks for weights, for peers and for whom to report to on the network, unless told not to.
_OFFLINE = (
    "HF_HUB_OFFLINE=1", "VLLM_HOST_IP=127.0.0.1", "GLOO_SOCKET_IFNAME=lo", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1",
)  # fmt: skip
_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)$")
_REASON = re.compile(r"\b\w*(?:Error|Exception): |^tq: ")
_NOT_THE_CAUSE = "See root cause above"


class Child:
    """Python with some arguments, and all that it starts; what it says goes to a log, unless stdin and stdout are piped."""

    def __init__(self, command: Sequence[str], log: Path, *, with_pipes: bool = False) -> None:
        self.log = log
        self._file = log.open("w", encoding="utf-8")
        pipe, out = (subprocess.PIPE, subprocess.PIPE) if with_pipes else (subprocess.DEVNULL, self._file)
        # A group of its own: Ctrl-C is ours alone, and what is left of the group can be found.
        self.process = subprocess.Popen(
            ["env", *_OFFLINE, sys.executable, *command], stdin=pipe, stdout=out, stderr=self._file, text=True,
            start_new_session=True,
        )  # fmt: skip

    def stop(self, patience: float = 20.0) -> None:
        """End it and whatever it started; those that do not leave in time are killed."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + patience
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            while (self.process.poll() is None or self.members()) and time.monotonic() < until:
                time.sleep(0.05)
        self.process.wait()
        self._file.close()

    def members(self) -> dict[int, tuple[str, float]]:
        """Processes of its group that run: each one's name and processor time so far; none where there is no /proc."""
        processes = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                head, _, tail = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")  # a name may hold brackets
                fields = tail.split()
                if int(fields[2]) == self.process.pid and fields[0] != "Z":
                    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
                    processes[int(stat.parent.name)] = head.split("(", 1)[1], seconds
        return processes

    def cpu_seconds(self, name: str) -> float:
        """Processor time so far of those whose name begins so, all their threads."""
        return sum(seconds for command, seconds in self.members().values() if command.startswith(name))

    def reason(self) -> str:
        """The line of its log that says best why it ended."""
        return last_reason(self.log.read_text(encoding="utf-8", errors="replace"))


class Server(Child):
    """vLLM's server with one storage of K and V, called so by rows; model and flags are those of `tq serve`."""

    def __init__(self, model: Path, kv: str, flags: Sequence[str], log: Path) -> None:
        self.kv, self.port = kv, free_port()
        where = ("--host", "127.0.0.1", "--port", str(self.port))
        super().__init__(["-m", "tq", "serve", str(model), *flags, *where], log)

    def wait(self, seconds: float) -> None:
        """Return when it answers; refused with what it said last if it ended, or did not answer in time."""
        until = time.monotonic() + seconds
        while True:
            with suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            if self.process.poll() is not None:
                raise InputError(f"the server with {self.kv} did not start: {self.reason()}")
            if time.monotonic() > until:
                raise InputError(f"the server with {self.kv} did not answer in {seconds:.0f} s: {self.reason()}")
            time.sleep(0.5)

    def metrics(self) -> dict[str, float]:
        """What `/metrics` tells now, as `parse_metrics`."""
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
                return parse_metrics(answer.read().decode())
        except (URLError, OSError) as error:
            raise InputError(f"the server with {self.kv} does not answer ({error}): {self.reason()}") from None


@contextmanager
def ending(children: list[Child]) -> Iterator[None]:
    """End all children on the way out, whatever the way; a second Ctrl-C does not cut that short."""
    try:
        yield
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for child in children:
            child.stop()
        signal.signal(signal.SIGINT, before)


def free_port() -> int:
    """A port of the loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus' text by name: samples that differ in their labels added up; `tokens`, the KV cache's size, from a label."""
    metrics: dict[str, float] = {}
    for line in text.splitlines():
        if sample := _SAMPLE.match(line):
            name = sample["name"]
            metrics[name] = metrics.get(name, 0.0) + float(sample["value"])
            if name == "vllm:cache_config_info" and (size := re.search(r'kv_cache_size_tokens="(\d+)"', sample["labels"])):
                metrics["tokens"] = float(size[1])
    return metrics


def last_reason(log: str) -> str:
    """The last line that names an error and is not about another one; the last line of all if none does."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reasons = [line[match.start() :] for line in lines if (match := _REASON.search(line)) and _NOT_THE_CAUSE not in line]
    return (reasons or lines or ["it said nothing"])[-1]


class Client(Child):
    """vLLM's benchmark client in a process of its own."""

    def __init__(self, log: Path) -> None:
        super().__init__(["-m", "lab.bench.serve_process"], log, with_pipes=True)

    def round(self, args: list[str]) -> dict[str, object]:
        """Run one round to its end; what the client would save. Refused with what it said last if it ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        answer = ""
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(args) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        if not answer:
            raise InputError(f"the benchmark client ended: {self.reason()}")
        result: dict[str, object] = json.loads(answer)
        return result


def main() -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as run
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    answers, sys.stdout = sys.stdout, sys.stderr
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for line in sys.stdin:
        answers.write(json.dumps(run(parser.parse_args(json.loads(line))), default=float) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
