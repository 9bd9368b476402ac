"""Whom `python -m lab.bench decode` measures beside ours: torch's SDPA, transformers with its caches, llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import torch

from haarkv.benchmarks.cases import kv_numbers, seen
from haarkv.benchmarks.decode_cost import CostRow
from haarkv.benchmarks.runs import Asked, Variant, copies, random_prompts, steps_of
from haarkv.benchmarks.timing import OnTurn
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.output_files import TemporaryFolder
from lab.bench import decode_peers, gguf_file, llama_process
from lab.bench.decode_peers import HFCache
from lab.bench.llama_process import BITS, LlamaError, LlamaKV, LlamaProcess

SDPA, TRANSFORMERS, LLAMA = PEERS = ("sdpa", "transformers", "llama.cpp")
_WARM_UP = 32  # tokens of a prompt that brings weights into memory, and does not count


@dataclass
class Peers:
    """Some of `PEERS`, for one run of a model: what `decode.measure` takes as `beside`.

    Attributes:
        stack: closes what was started, when the run is over.
        llama_kvs: kinds of llama.cpp's KV cache.
        hf_caches: other caches for transformers' model, measured beside its own.
    """

    names: Sequence[str]
    model_name: str
    stack: ExitStack
    llama_kvs: Sequence[LlamaKV] = ()
    hf_caches: Callable[[ModelConfig], Sequence[HFCache]] = lambda _: ()
    on_turn: OnTurn = lambda _: None
    process: LlamaProcess | None = None

    def __call__(self, kind: str, asked: Asked) -> Iterator[Variant]:
        """torch's attention, and on a GPU FlashAttention's and FlashInfer's; llama.cpp's and transformers' forwards."""
        if kind == "attention":
            yield from attention(asked) if SDPA in self.names else ()
            return
        if LLAMA in self.names:
            self.process = self.process or self._llama(asked.model)
            yield from (llama(self.process, cache, kind, asked) for cache in self.llama_kvs)
        if TRANSFORMERS in self.names and kind == "prompt":
            yield decode_peers.transformers_prompt(asked.model, random_prompts(asked.model.config, asked.case))
        elif TRANSFORMERS in self.names:
            more = self.hf_caches(asked.model.config)
            yield from decode_peers.transformers_steps(asked.model, asked.case.batch, asked.k, asked.v, more)

    def _llama(self, model: DecoderModel) -> LlamaProcess:
        llama_process.require()
        if not gguf_file.source_file(self.model_name) and (reason := gguf_file.unsupported(model.config)):
            raise InputError(f"llama.cpp is no peer of {self.model_name}: {reason}")
        with TemporaryFolder("gguf") as folder:
            file = gguf_file.source_file(self.model_name)
            if file is None:
                self.on_turn("the GGUF being written")
                gguf_file.write(file := folder / "model.gguf", model)
            self.on_turn("llama.cpp loading it")
            try:
                # It maps the file into memory, so that one of ours can go.
                process = LlamaProcess(file, torch.get_num_threads())
            except LlamaError as error:
                raise InputError(f"llama.cpp cannot be measured: {error}") from None
        self.stack.callback(process.close)
        return process


def attention(asked: Asked) -> list[Variant]:
    """Others' decode attention of a case, over what its first layer sees."""
    k, q, window = asked.k, asked.queries, asked.model.config.layers[0].attention.window
    keys, values = (x[:, :, -seen(window, asked.case.context) :] for x in (k, asked.v))
    peers = list(decode_peers.attention(q, keys, values, copies))
    if peers and peers[0].run and k.device.type == "cuda":
        exact = cast(torch.Tensor, peers[0].run(0)).float()
        peers += decode_peers.packages(q.to(k.dtype).unsqueeze(1), keys, values, exact, copies)
    return peers


def llama(process: LlamaProcess, cache: LlamaKV, kind: str, asked: Asked) -> Variant:
    """llama.cpp with one kind of KV cache: a prompt, or steps behind one, by its own clock."""
    if asked.case.batch > 1:
        raise InputError("llama.cpp is measured with one sequence; leave out --batches")
    (ids,) = random_prompts(asked.model.config, asked.case)

    def prompt(_: int) -> float:
        seconds: float = process.call("prompt", cache, ids)
        return seconds

    def step(number: int) -> float:
        (seconds,) = process.call("steps", cache, ids[number % len(ids) :][:1])
        return float(seconds)

    name, nbytes = f"llama.cpp {cache.name}", [numbers * BITS[cache.type] / 8 for numbers in kv_numbers(asked.model.config)]
    try:
        process.call("open", cache, asked.case.context + steps_of(asked.repeats))
        process.call("prompt", cache, ids[:-1] if kind == "step" else ids[:_WARM_UP])
    except LlamaError as error:
        return Variant(name, None, nbytes, f"at {asked.case.context:,} tokens: {error}", process.about)
    return Variant(name, step if kind == "step" else prompt, nbytes, "", process.about)


def beside_llama(rows: Sequence[CostRow]) -> Iterator[str]:
    """Each time of ours beside llama.cpp's best of the same kind and case."""
    timed = [(r, r.ms) for r in rows if r.ms is not None]
    for r, ms in timed:
        case = [(p_ms, p.who) for p, p_ms in timed if p.who.startswith(LLAMA) and (p.kind, p.case) == (r.kind, r.case)]
        if case and not r.peer:
            best, who = min(case)
            yield (
                f"{r.kind} of {r.who} at {r.case.context:,} tokens: {best / ms:.2f} times as fast as {who}, the fastest of "
                "llama.cpp's"
            )
