"""Requests served in one way after another by vLLM's engine, in a process of its own.

Run as a script this is that process: each line of its input is a way and its requests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm_drafts import eagle3
from vllm_server import ENVIRONMENT, Answer

from haarkv.models.catalog import find_model

_ROOM, _SMALL = 2**28, 14
"""Bytes of a cache with room for all; blocks of one in which users make room for each other."""
DRAFT_TOKENS, SINKS = 3, 4
FAULTS = ("dummy-lengths", "stale-lengths")
_ANSWER = "soak: "
STAND_IN = Path(__file__).parent / "stand_in"
"""A module that vLLM imports with Qwen3.5 and that text never runs; packages of it for CPUs are not on PyPI."""


def look_up_stand_ins(monkeypatch) -> None:
    """Let this process find the stand-ins, and the one in which vLLM looks at an architecture."""
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(STAND_IN)))))


@dataclass(frozen=True)
class Way:
    """One way to serve.

    Attributes:
        model: `tiny` or `tiny-hybrid`.
        kv: the cache's format.
        tail: newest tokens in BF16, with the first 4; 0 for neither.
        drafts: vLLM's method, or "".
        prefix: whether prefixes are cached.
        chunk: tokens of a forward at most; 0 for vLLM's default.
        small: whether requests must make room for each other.
        context: tokens of a request at most.
        at_once: requests that run at the same time, at most.
    """

    model: str = "tiny"
    kv: str = "tq4"
    tail: int = 0
    drafts: str = ""
    prefix: bool = True
    chunk: int = 0
    small: bool = False
    context: int = 512
    at_once: int = 25

    def __str__(self) -> str:
        parts = (
            self.model, self.kv, f"tail {self.tail}" if self.tail else "no tail", self.drafts or "no drafts",
            "prefixes" if self.prefix else "no prefixes", f"chunks of {self.chunk}" if self.chunk else "whole prompts",
            "little room" if self.small else "room",
        )  # fmt: skip
        return ", ".join(parts)


@dataclass(frozen=True)
class Request:
    """A prompt of token ids, and how many tokens to write."""

    prompt: Sequence[int]
    new_tokens: int


@dataclass(frozen=True)
class ServedTexts:
    """What came back.

    Attributes:
        texts: token ids, request by request.
        figures: vLLM's counters by name.
        seconds: of start and of service.
    """

    texts: list[list[int]]
    figures: dict[str, float]
    seconds: tuple[float, float]

    @property
    def answers(self) -> list[Answer]:
        """For a judge; no other token's probability is known."""
        return [Answer(tuple(text), ((),) * len(text), "length") for text in self.texts]


class Servers:
    """A process in which one engine after another serves.

    Args:
        log: a file for what vLLM says.
    """

    def __init__(self, log: Path) -> None:
        parent_env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        paths = os.pathsep.join((ENVIRONMENT["PYTHONPATH"], str(STAND_IN)))
        # The engine runs in that process itself, where a fault can be planted.
        environment = {**parent_env, **ENVIRONMENT, "PYTHONPATH": paths, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self.log = log
        with log.open("wb") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log_file, text=True,
                env=environment,
            )  # fmt: skip

    def serve(self, way: Way, requests: Sequence[Request], fault: str = "") -> ServedTexts:
        """Start an engine that serves so, and take what it wrote.

        Args:
            fault: one of `FAULTS` to plant, or "".
        """
        payload = [[list(request.prompt), request.new_tokens] for request in requests]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"way": asdict(way), "fault": fault, "requests": payload}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                reply = json.loads(line.removeprefix(_ANSWER))
                return ServedTexts(reply["texts"], reply["figures"], tuple(reply["seconds"]))
        raise AssertionError(f"{way}: the engine ended\n" + "\n".join(self.log.read_text(errors="replace").splitlines()[-60:]))

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# -- In that process ----------------------------------------------------------------------------------------------------------


def _drafts(method: str, folder: str) -> dict[str, Any] | None:
    if not method:
        return None
    settings: dict[str, Any] = {"method": method, "num_speculative_tokens": DRAFT_TOKENS}
    if method == "ngram":
        return settings | {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if method == "draft_model":  # the model itself, so nearly all is accepted
        return settings | {"model": str(find_model("tiny"))}
    if method == "eagle3":  # of random weights, so nothing is
        return settings | {"model": str(eagle3(Path(folder) / "eagle3"))}
    return settings


def _run(way: Way, requests: Sequence[Request], fault: str) -> ServedTexts:
    # Imported late: the process that starts this one does without vLLM's engine.
    from vllm import LLM, SamplingParams

    from haarkv.serving.vllm_plugin import FORMAT, SINK, TAIL

    cache = {FORMAT: way.kv} | ({TAIL: way.tail, SINK: SINKS} if way.tail else {})
    model, began = find_model(way.model), time.monotonic()
    with TemporaryDirectory() as folder:
        engine = LLM(
            model=str(model), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=way.context,
            attention_backend="CUSTOM", additional_config=cache, enable_prefix_caching=way.prefix,
            max_num_seqs=way.at_once, max_num_batched_tokens=way.chunk or None, disable_log_stats=False,
            speculative_config=_drafts(way.drafts, folder), kv_cache_memory_bytes=_ROOM,
            num_gpu_blocks_override=_SMALL if way.small else None,
        )  # fmt: skip
    start_time = time.monotonic()
    prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
    how = [SamplingParams(temperature=0, max_tokens=r.new_tokens, ignore_eos=True, detokenize=False) for r in requests]
    with _plant_fault(fault):
        outputs = engine.generate(prompts, how, use_tqdm=False)
    end_time = time.monotonic()
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    return ServedTexts(texts, _figures(engine.get_metrics()), (start_time - began, end_time - start_time))


def _figures(metrics: Sequence[Any]) -> dict[str, float]:
    """Counters and gauges, summed over their labels."""
    figures: dict[str, float] = {}
    for metric in metrics:
        if hasattr(metric, "value"):
            figures[metric.name] = figures.get(metric.name, 0.0) + float(metric.value)
    return figures


@contextmanager
def _plant_fault(fault: str) -> Iterator[None]:
    """Describe batches that verify drafts by other lengths than theirs, as a graph does that was captured with dummies."""
    from haarkv.serving.vllm_plugin import backend

    right: Callable[..., Any] = backend.forward_batch
    first: dict[int, Any] = {}

    def wrong(common: Any, buffers: Any) -> Any:
        count = common.num_reqs
        new, lengths = common.query_start_loc[: count + 1].diff(), common.seq_lens[:count]
        verifies = (new > 1) & (new <= DRAFT_TOKENS + 1) & (lengths > new)
        if not verifies.any():
            return right(common, buffers)
        first_lengths = first.setdefault(count, lengths.clone())
        dummy = new if fault == "dummy-lengths" else lengths.minimum(first_lengths).maximum(new)
        return right(common.replace(seq_lens=dummy.where(verifies, lengths).to(lengths.dtype)), buffers)

    backend.forward_batch = wrong if fault else right
    try:
        yield
    finally:
        backend.forward_batch = right


def main() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    for line in sys.stdin:
        message = json.loads(line)
        requests = [Request(prompt, new) for prompt, new in message["requests"]]
        try:
            result = _run(Way(**message["way"]), requests, message["fault"])
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # threads of an engine that failed may wait for ever
        print(_ANSWER + json.dumps(asdict(result)), flush=True)
        cleanup_dist_env_and_memory()
        # Once is enough for a process, and a second time it stumbles over a module that n-gram drafts import.
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)


if __name__ == "__main__":
    main()
