"""A real server in processes of its own, and a client for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests

from haarkv.models.catalog import TINY

ROOT = Path(__file__).parents[2]
MODEL = str(TINY)
MAX_MODEL_LEN = 1024
CACHE_BYTES = 64 * 2**20
CANDIDATES = 5
_STARTS_IN_S, _ANSWERS_IN_S = 300, 300
_FLAGS = ("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN), "--host", "127.0.0.1")
# One machine without network, and no report of use.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "PYTHONPATH": str(ROOT),
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What was served after one prompt.

    Attributes:
        token_ids: new tokens.
        candidates: position by position, (token, natural log-probability) of what was served and of the likeliest.
        finish: why it ended.
    """

    token_ids: tuple[int, ...]
    candidates: tuple[tuple[tuple[int, float], ...], ...]
    finish: str


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: of it, without a path.
        process: the leader of its process group.
        log: what it says.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    session: requests.Session = field(default_factory=requests.Session)

    def post(self, path: str = "/v1/completions", **options: Any) -> requests.Response:
        return requests.post(self.url + path, timeout=_ANSWERS_IN_S, **options)

    def complete(self, prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any) -> list[Answer]:
        """Continue prompts of token ids, all at once, past any end of text; greedily unless told otherwise."""
        response = self.post(json=request(prompts, max_tokens, **options))
        assert response.status_code == 200, f"{response.text}\n{self.tail()}"
        return [_answer(choice) for choice in sorted(response.json()["choices"], key=lambda choice: choice["index"])]

    def metrics(self) -> dict[str, float]:
        """Every figure of `/metrics`, summed over its labels."""
        figures: dict[str, float] = {}
        for name, _, value in self._samples():
            figures[name] = figures.get(name, 0.0) + value
        return figures

    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds, as vLLM reports them."""
        [labels] = [labels for name, labels, _ in self._samples() if name == "vllm:cache_config_info"]
        return int(labels.split('kv_cache_size_tokens="')[1].split('"')[0])

    def _samples(self) -> Iterator[tuple[str, str, float]]:
        for line in requests.get(self.url + "/metrics", timeout=60).text.splitlines():
            if line and not line.startswith("#"):
                key, value = line.rsplit(" ", 1)
                name, _, labels = key.partition("{")
                yield name, labels, float(value)

    def workers(self) -> list[psutil.Process]:
        """The processes that run the model and hold its pages."""
        processes = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                processes += [process] if "Worker" in " ".join(process.cmdline()) else []
        assert processes, "no worker among the server's processes"
        return processes

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def _answer(choice: dict[str, Any]) -> Answer:
    tops = choice["logprobs"]["top_logprobs"]
    candidates = tuple(tuple((int(name.removeprefix("token_id:")), value) for name, value in top.items()) for top in tops)
    assert len(candidates) == len(choice["token_ids"])
    return Answer(tuple(choice["token_ids"]), candidates, choice["finish_reason"])


def request(prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any) -> dict[str, Any]:
    """The body of a completion."""
    return {
        "model": MODEL, "prompt": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, "temperature": 0.0,
        "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": CANDIDATES, **options,
    }  # fmt: skip


@contextmanager
def serving(
    log: Path,
    *flags: str,
    kv: str | None = "tq4",
    cache_bytes: int = CACHE_BYTES,
    model: str = MODEL,
    **environment: str,
) -> Iterator[Server]:
    """Start a server, wait until it answers, and stop all its processes in the end.

    Args:
        log: a file for what it says.
        flags: of `tq serve`, beside those that all servers here have.
        kv: None where a plan among the flags says it.
        model: a folder; clients call it `MODEL`, too.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "tq", "serve", model, "--served-model-name", MODEL, *(("--kv", kv) if kv else ()), *_FLAGS,
        "--port", str(port), "--kv-cache-memory-bytes", str(cache_bytes), *flags,
    ]  # fmt: skip
    parent_env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=log.parent,
            env={**parent_env, **ENVIRONMENT, **environment},
        )  # fmt: skip
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait(server)
        yield server
        assert process.poll() is None, f"the server ended by itself\n{server.tail()}"
    finally:
        _stop(process)


def _wait(server: Server) -> None:
    deadline = time.monotonic() + _STARTS_IN_S
    while time.monotonic() < deadline:
        assert server.process.poll() is None, f"the server did not start\n{server.tail()}"
        with suppress(requests.ConnectionError, requests.Timeout):
            if requests.get(server.url + "/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"the server did not start within {_STARTS_IN_S} s\n{server.tail()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole group; what does not hear is killed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
