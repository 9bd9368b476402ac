"""How others attend to bf16 K and V: SDPA in every form; FlashInfer and FlashAttention where they are installed.

What is not installed is a peer all the same, with the reason in place of a run, so that no table hides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from haarkv.benchmarks import decode_peers

_PAGE = 16
_WORKSPACE = 128 * 2**20


class Peer(NamedTuple):
    """One way of computing attention, or why it is absent.

    `make` gives the call, or raises what is wrong with this peer here. A call takes the number of the copy of K and V that it
    reads, and returns [B * new, Hq, D] in any shape of as many numbers.
    """

    name: str
    make: Callable[[], Callable[[int], Tensor]]
    absent: str = ""


def decode(q: Tensor, k: Tensor, v: Tensor, copies: Callable[[float], int]) -> Iterator[Peer]:
    """Peers of a decode step: one new token a sequence, q [B, Hq, D], sees all of k, v [B, Hkv, S, D] bf16."""
    for peer in decode_peers.attention(q, k, v, copies):
        yield Peer(peer.name, lambda run=peer.run: run)  # type: ignore[misc]
    count = copies(2 * k.numel() * k.itemsize)
    yield from _flash_attention(q.unsqueeze(1), k, v, count)
    yield _flash_infer(q, k, v, count)


def prefill(q: Tensor, k: Tensor, v: Tensor) -> Iterator[Peer]:
    """Peers of a prompt of one sequence: q [T, Hq, D] of its new tokens, the last of k, v [1, Hkv, S, D] bf16."""
    new, length = len(q), k.shape[2]
    rows, group = q.transpose(0, 1).unsqueeze(0), q.shape[1] // k.shape[1]
    repeated = [x.repeat_interleave(group, dim=1) for x in (k, v)]

    def sdpa(backend: Any, *, gqa: bool) -> Callable[[int], Tensor]:
        keys, values = (k, v) if gqa else repeated
        mask: Any = None if new == length else causal_lower_right(new, length)

        @torch.inference_mode()
        def run(_number: int) -> Tensor:
            with sdpa_kernel(backend) if backend is not None else nullcontext():
                out = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)
            return out[0].transpose(0, 1)

        return run

    for form in ("gqa", "repeated"):
        for word, backend in decode_peers.sdpa_backends(q.device).items():
            yield Peer(f"sdpa bf16 {form}{word}", partial(sdpa, backend, gqa=form == "gqa"))
    yield from _flash_attention(q.unsqueeze(0), k, v, 1)

    def single() -> Callable[[int], Tensor]:
        prompt = import_module("flashinfer").single_prefill_with_kv_cache
        keys, values = (x[0].transpose(0, 1).contiguous() for x in (k, v))
        return lambda _number: prompt(q, keys, values, causal=True)

    yield Peer("flashinfer", single, _absent("flashinfer"))


def _absent(module: str) -> str:
    return "" if find_spec(module) else f"{module} is not installed"


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, count: int) -> Iterator[Peer]:
    """FlashAttention 3 and 2, which share a signature; q: [B, new, Hq, D]."""

    def make(module: str) -> Callable[[int], Tensor]:
        attend = import_module(module).flash_attn_with_kvcache
        lengths = torch.full((len(q),), k.shape[2], dtype=torch.int32, device=q.device)
        kv = [[x.transpose(1, 2).contiguous() for x in (k, v)] for _ in range(count)]

        def run(number: int) -> Tensor:
            given = attend(q, *kv[number % count], cache_seqlens=lengths, causal=True)
            out: Tensor = given[0] if isinstance(given, tuple) else given
            return out

        return run

    for name, module in (("flash-attention 3", "flash_attn_interface"), ("flash-attention 2", "flash_attn")):
        yield Peer(name, partial(make, module), _absent(module))


def _flash_infer(q: Tensor, k: Tensor, v: Tensor, count: int) -> Peer:
    """FlashInfer's decode over pages of 16 tokens."""

    def make() -> Callable[[int], Tensor]:
        wrapper = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
        batch, kv_heads, length, dim = k.shape
        pages = length // _PAGE
        paged = [x.view(batch, kv_heads, pages, _PAGE, dim).transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v)]
        kv = [[x.clone() for x in paged] for _ in range(count)]
        steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * pages
        indices = torch.arange(batch * pages, dtype=torch.int32, device=q.device)
        last = torch.full((batch,), _PAGE, dtype=torch.int32, device=q.device)
        # A graph needs the buffers of the plan to stay where they are.
        planned = wrapper(
            torch.empty(_WORKSPACE, dtype=torch.uint8, device=q.device), "HND", use_cuda_graph=True, use_tensor_cores=True,
            paged_kv_indptr_buffer=steps.clone(), paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )  # fmt: skip
        types = dict.fromkeys(("q_data_type", "kv_data_type"), torch.bfloat16)
        planned.plan(steps, indices, last, q.shape[1], kv_heads, dim, _PAGE, **types)
        return lambda number: planned.run(q, tuple(kv[number % count]))

    return Peer("flashinfer", make, _absent("flashinfer"))
