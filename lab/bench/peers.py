"""Whom `python -m lab.bench decode` measures beside ours: torch's SDPA, transformers with its caches, llama.cpp."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, cast

import torch

from haarkv.benchmarks.attention import Asked, copies
from haarkv.benchmarks.beside import Beside, Side, SideError, Variant
from haarkv.benchmarks.cases import kv_numbers, seen
from haarkv.benchmarks.decode_cost import CostRow
from haarkv.benchmarks.timing import OnTurn
from haarkv.models.base import DecoderModel
from haarkv.models.config import ModelConfig
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.temporary import TemporaryFolder
from lab.bench import decode_peers, gguf_file, llama_process
from lab.bench.decode_peers import HFCache
from lab.bench.llama_process import BITS, LlamaError, LlamaKV, LlamaProcess

SDPA, TRANSFORMERS, LLAMA = PEERS = ("sdpa", "transformers", "llama.cpp")


@dataclass(frozen=True)
class Peers(Beside):
    """Some of `PEERS`, for one run of a model.

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

    @property
    def on_prompts(self) -> bool:  # type: ignore[override]
        return LLAMA in self.names

    def attention(self, asked: Asked) -> Iterator[Variant]:
        """torch's, and on a GPU FlashAttention's and FlashInfer's."""
        if SDPA in self.names:
            yield from attention(asked)

    def steps(self, asked: Asked) -> Iterator[Variant]:
        """Those of transformers' caches."""
        if TRANSFORMERS in self.names:
            more = self.hf_caches(asked.model.config)
            yield from decode_peers.transformers_steps(asked.model, asked.case.batch, asked.k, asked.v, more)

    def sides(self, model: DecoderModel) -> Iterator[Side]:
        """llama.cpp with each kind of cache, which must be there; transformers' `DynamicCache`."""
        if LLAMA in self.names:
            yield from self._llama(model)
        if TRANSFORMERS in self.names:
            yield Transformers(model)

    def _llama(self, model: DecoderModel) -> Iterator[Side]:
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
        yield from (Llama(process, kind, model) for kind in self.llama_kvs)


def attention(asked: Asked) -> list[Variant]:
    """Others' decode attention of a case, over what its first layer sees."""
    k, q, window = asked.k, asked.queries, asked.model.config.layers[0].attention.window
    keys, values = (x[:, :, -seen(window, asked.case.context) :] for x in (k, asked.v))
    peers = list(decode_peers.attention(q, keys, values, copies))
    if peers and peers[0].run and k.device.type == "cuda":
        exact = cast(torch.Tensor, peers[0].run(0)).float()
        peers += decode_peers.packages(q.to(k.dtype).unsqueeze(1), keys, values, exact, copies)
    return peers


class Transformers(Side):
    """transformers' own model with the same weights, and its `DynamicCache`; nothing of it is needed before `open`."""

    def __init__(self, model: DecoderModel) -> None:
        item = model.dtype.itemsize
        super().__init__("hf DynamicCache bf16", [float(numbers * item) for numbers in kv_numbers(model.config)])
        self._ours, self._model = model, cast(Any, None)

    def open(self, context: int) -> None:
        if missing := decode_peers.transformers_missing(self._ours.config):
            raise SideError(missing)
        self._model = self._model or decode_peers.their_model(self._ours, "sdpa")
        self.about = f"transformers {version('transformers')} with SDPA"

    def prompt(self, ids: Sequence[int]) -> float:
        self._cache = decode_peers.their_cache(self._model.config, package=None)
        return self._call(ids)

    def steps(self, ids: Sequence[int]) -> list[float]:
        return [self._call([token]) for token in ids]

    @torch.inference_mode()
    def _call(self, ids: Sequence[int]) -> float:
        began = time.perf_counter()
        given = torch.tensor([list(ids)])
        out = self._model(input_ids=given, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        out.logits[:, -1].argmax(-1).tolist()
        return time.perf_counter() - began


class Llama(Side):
    """llama.cpp with one kind of KV cache."""

    def __init__(self, process: LlamaProcess, kind: LlamaKV, model: DecoderModel) -> None:
        nbytes = [numbers * BITS[kind.type] / 8 for numbers in kv_numbers(model.config)]
        super().__init__(f"llama.cpp {kind.name}", nbytes, process.about)
        for method in ("open", "prompt", "steps", "shut"):
            setattr(self, method, partial(process.call, method, kind))


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
