"""Layers with tokens in BF16 beside their packed pages, in memory that vLLM's own code lays out, hands out and takes back."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.request import Request
from vllm.v1.worker.utils import allocate_kv_cache
from vllm_paged import Shape, in_forward, plain_spec, rotated_metadata, vllm_metadata

from haarkv.serving.vllm_plugin.backend import RotatedAttention, with_content
from haarkv.serving.vllm_plugin.kv_choice import Pair, content_bytes
from haarkv.serving.vllm_plugin.pages import Tail, TailMetadata, tails_beside
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.kv.batch import Batch
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVPlan
from haarkv.tq_ops.kv.shapes import KVShape

CPU = torch.device("cpu")
CHUNK = 64
"""New tokens of a sequence at a time, at most."""


class Engine:
    """Two attention layers, or more, over one pool of blocks that vLLM's manager keeps; K and V follow from the tokens before.

    Args:
        pairs: formats of each layer.
        tail, sinks: newest and first tokens in BF16.
        config: of vLLM, for a model of this shape.
        blocks: in the pool.
    """

    def __init__(self, pairs: Sequence[Pair], tail: int, sinks: int, config: VllmConfig, shape: Shape, blocks: int) -> None:
        self.shape, self.pairs, self.tail, self.sinks = shape, pairs, tail, sinks
        names = [f"model.layers.{index}.self_attn.attn" for index in range(len(pairs))]
        packed = {
            name: with_content(plain_spec(shape), content_bytes(pair, shape.head_dim))
            for name, pair in zip(names, pairs, strict=True)
        }
        lossy_names = [name for name, pair in zip(names, pairs, strict=True) if any(side.lossy for side in pair)]
        self.tails: dict[str, Tail] = tails_beside(packed, lossy_names, tail, sinks)
        self.impls = [RotatedAttention(shape.heads, shape.head_dim, shape.softmax_scale, shape.kv_heads) for _ in names]
        for name, impl, pair in zip(names, self.impls, pairs, strict=True):
            impl.store_in(pair)
            if name in lossy_names:
                impl.keep_newest(self.tails[f"{name}.tail"])
        config.cache_config.kv_cache_layout = KVCacheLayout.BLHNC.name
        specs = packed | {name: tail.spec for name, tail in self.tails.items()}
        groups = get_kv_cache_groups(config, specs)
        self.block_bytes = sum(spec.page_size_bytes for spec in packed.values())
        self.made = get_kv_cache_config_from_groups(config, groups, self.block_bytes * blocks)
        sizes = [group.kv_cache_spec.block_size for group in groups]
        self.views = allocate_kv_cache(self.made, CPU, KVCacheLayout.BLHNC, sizes)
        for view in self.views.values():
            view.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(1))
        for name, layer_tail in self.tails.items():
            layer_tail.bind_kv_cache(self.views[name])
        self.names = names
        scheduler_size, hash_size = resolve_kv_cache_block_sizes(self.made, config)
        self.manager = KVCacheManager(
            generate_scheduler_kv_cache_config([self.made]), max_model_len=1024, max_in_flight_tokens=CHUNK,
            scheduler_block_size=scheduler_size, hash_block_size=hash_size,
        )  # fmt: skip
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_size, sha256)

    def request(self, name: str, tokens: Sequence[int]) -> Request:
        return Request(name, list(tokens), SamplingParams(max_tokens=1), None, block_hasher=self._hasher)

    def begin(self, request: Request) -> int:
        """Take what is known of a request's tokens; returns how many are."""
        blocks, cached_tokens, _ = self.manager.get_computed_blocks(request)
        count = min(CHUNK, request.num_tokens - cached_tokens)
        assert self.manager.allocate_slots(request, count, cached_tokens, blocks) is not None
        request.num_computed_tokens = cached_tokens
        return cached_tokens

    def go_on(self, request: Request, count: int) -> None:
        """Room for the next tokens of a request that has begun."""
        assert self.manager.allocate_slots(request, count) is not None

    def forward(self, requests: Sequence[Request], counts: Sequence[int], kv: TokenKV) -> list[Tensor]:
        """Store and attend the next tokens of requests, for which there is room; the output of each layer [T, Hq, D]."""
        metadata, slots = {}, {}
        for group, spec in enumerate(self.made.kv_cache_groups):
            batch = self._batch(requests, counts, group, spec.kv_cache_spec.block_size)
            common = vllm_metadata(batch)
            for name in spec.layer_names:
                slots[name] = batch.slot_mapping
                if name in self.tails:
                    metadata.setdefault(f"tail {group}", TailMetadata(common.block_table_tensor))
                    metadata[name] = metadata[f"tail {group}"]
                else:
                    metadata.setdefault(f"packed {group}", rotated_metadata(common))
                    metadata[name] = metadata[f"packed {group}"]
        outs = []
        with in_forward(metadata, slots):
            for index, name in enumerate(self.names):
                layer, (q, k, v) = SimpleNamespace(layer_name=name), kv.next_tokens(requests, counts, index)
                self.impls[index].do_kv_cache_update(layer, k, v, self.views[name], slots[name])
                outs.append(self.impls[index].forward(layer, q, k, v, self.views[name], metadata[name], torch.zeros_like(q)))
        for request, count in zip(requests, counts, strict=True):
            request.num_computed_tokens += count
        return outs

    def _batch(self, requests: Sequence[Request], counts: Sequence[int], group: int, size: int) -> Batch:
        tables = [
            torch.tensor(self.manager.get_block_ids(request.request_id)[group], dtype=torch.int32) for request in requests
        ]
        return batch_at([(r.num_computed_tokens, n) for r, n in zip(requests, counts, strict=True)], tables, size)


class TokenKV:
    """Queries, K and V of tokens: each follows from the token and its position alone."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._drawn: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def next_tokens(self, requests: Sequence[Request], counts: Sequence[int], layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the next tokens, [T, heads, D] bf16."""
        rows = [
            self._token(request.all_token_ids[at], at, layer)
            for request, count in zip(requests, counts, strict=True)
            for at in range(request.num_computed_tokens, request.num_computed_tokens + count)
        ]
        q, k, v = (torch.stack(side) for side in zip(*rows, strict=True))
        return q, k, v

    def _token(self, token: int, position: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        if (key := (token, position, layer)) not in self._drawn:
            generator = torch.Generator().manual_seed(1_000_003 * token + 1009 * position + layer)
            heads = (self.shape.heads, self.shape.kv_heads, self.shape.kv_heads)
            q, k, v = (torch.randn(n, self.shape.head_dim, generator=generator).bfloat16() for n in heads)
            self._drawn[key] = 2 * q, k, v
        return self._drawn[key]


def alone(engine: Engine, kv: TokenKV, tokens: Sequence[int], chunk: int = CHUNK) -> list[Tensor]:
    """What a cache of our own with a ring makes of all tokens of a sequence: the output of each layer [T, Hq, D]."""
    ops, shape, outs = CpuOps(), engine.shape, []
    plan = KVPlan(tuple(engine.pairs), recent=engine.tail, sink=engine.sinks)
    blocks = -(-len(tokens) // shape.block_size)
    cache = PagedKVCache(
        plan, KVShape(shape.kv_heads, shape.head_dim), num_blocks=blocks, num_rows=1, block_size=shape.block_size, chunk=chunk
    )
    table = torch.arange(blocks, dtype=torch.int32)
    for layer in range(len(engine.pairs)):
        outputs = []
        for begin in range(0, len(tokens), chunk):
            request = SimpleNamespace(all_token_ids=tokens, num_computed_tokens=begin)
            count = min(chunk, len(tokens) - begin)
            q, k, v = kv.next_tokens([request], [count], layer)
            batch = batch_at([(begin, count)], [table], shape.block_size)
            ops.store_kv(k, v, cache.view(layer, batch))
            outputs.append(ops.paged_attention(q, cache.view(layer, batch), shape.softmax_scale))
        outs.append(torch.cat(outputs))
    return outs


def batch_at(places: Sequence[tuple[int, int]], tables: Sequence[Tensor], size: int) -> Batch:
    """A batch of sequences with their numbers of stored and of new tokens, over blocks of their own."""
    positions = [torch.arange(begin, begin + count) for begin, count in places]
    slots = [
        table[position // size].long() * size + position % size for position, table in zip(positions, tables, strict=True)
    ]
    starts = torch.tensor([0, *(count for _, count in places)]).cumsum(0).int()
    return Batch(
        positions=torch.cat(positions), slot_mapping=torch.cat(slots),
        block_table=torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True),
        seq_lens=torch.tensor([begin + count for begin, count in places], dtype=torch.int32), query_start_loc=starts,
        rows=torch.arange(len(places)),
    )  # fmt: skip
