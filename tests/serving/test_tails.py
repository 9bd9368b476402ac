"""The newest and the first tokens of a sequence in BF16, in blocks that vLLM's own manager keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm_paged import Shape
from vllm_tails import CHUNK, Engine, KVOf, alone

from haarkv.models.catalog import TINY
from haarkv.serving.vllm_plugin import tails
from haarkv.tq_ops import formats
from haarkv.tq_ops.formats import made_up

pytestmark = pytest.mark.vllm_short

SHAPE = Shape(heads=4, block_size=128)
TAIL, SINKS = 40, 3
PAIRS = ("k=lr4,v=tq4", "bf16", "k=tq5,v=tq3")


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    args = EngineArgs(
        model=str(TINY), skip_tokenizer_init=True, attention_backend="CUSTOM", enforce_eager=True, load_format="dummy",
        kv_cache_memory_bytes=2**24, max_model_len=1024, block_size=SHAPE.block_size,
    )  # fmt: skip
    return args.create_engine_config()


def engine(config: VllmConfig, pairs=PAIRS, tail: int = TAIL, sinks: int = SINKS, blocks: int = 40) -> Engine:
    learned = made_up.calibration(len(pairs), SHAPE.kv_heads, SHAPE.head_dim)
    return Engine([formats.parse(pair, learned) for pair in pairs], tail, sinks, config, SHAPE, blocks)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 4096, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Served:
    """Requests of an engine, each judged by what a cache of our own makes of its tokens."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.kv, self.right = engine, KVOf(SHAPE), {}
        self.equal = True

    def begin(self, name: str, of: list[int]):
        """A request, and how many of its tokens were known."""
        self.right[name] = alone(self.engine, self.kv, of)
        request = self.engine.request(name, of)
        return request, self.engine.begin(request)

    def forward(self, requests, counts) -> None:
        at = [request.num_computed_tokens for request in requests]
        outs = self.engine.forward(requests, counts, self.kv)
        for layer, out in enumerate(outs):
            right = [self.right[r.request_id][layer][a : a + n] for r, a, n in zip(requests, at, counts, strict=True)]
            self.equal = self.equal and torch.equal(out, torch.cat(right))


def scenario(engine: Engine) -> tuple[Served, list[int]]:
    """Chunks, batches of unequal lengths, a known prefix, and a request that is put off and comes back; what was known of each."""
    served, shared = Served(engine), tokens(300, 1)
    first, known_first = served.begin("first", shared)
    served.forward([first], [CHUNK])
    other, known_other = served.begin("other", tokens(70, 2))
    engine.go_on(first, 60)
    served.forward([first, other], [60, CHUNK])
    for counts in ((50, 1), (64, 1), (20, 1), (40, 2)):
        for request, count in zip((first, other), counts, strict=True):
            engine.go_on(request, count)
        served.forward([first, other], counts)
    second, known_second = served.begin("second", shared[:280] + tokens(40, 3))
    served.forward([second], [min(CHUNK, 320 - known_second)])
    engine.go_on(first, 2)
    served.forward([first], [2])
    engine.manager.free(other)  # put off; its blocks go to whoever asks
    third, _ = served.begin("third", tokens(200, 4))
    served.forward([third], [CHUNK])
    back, known_back = served.begin("back", tokens(70, 2))
    served.forward([third, back][1:], [min(CHUNK, 70 - known_back)])
    for _ in range(2):
        engine.go_on(third, 64)
        served.forward([third], [64])
    return served, [known_first, known_other, known_second, known_back]


@pytest.mark.parametrize(("tail", "sinks"), [(TAIL, SINKS), (124, 0), (1, 20), (0, 4)])
def test_attention_is_that_of_a_ring_of_our_own_whoever_has_the_blocks(config, tail, sinks):
    served, known = scenario(engine(config, tail=tail, sinks=sinks))
    assert served.equal
    assert known == [0, 0, 256, 0]


def test_layers_of_different_pages_share_a_pool_without_padding(config):
    """One group packed and one of tails, in blocks as large as all layers' packed pages side by side."""
    made = engine(config)
    packed, kept = made.made.kv_cache_groups
    assert [len(packed.layer_names), len(kept.layer_names)] == [3, 2]
    assert made.made.num_blocks == 40
    assert {tensor.block_stride for tensor in made.made.kv_cache_tensors} == {made.block_bytes}
    sizes = [tail.spec.page_size_bytes for tail in made.tails.values()]
    assert made.block_bytes / 2 < sum(sizes) <= made.block_bytes


def test_blocks_behind_the_tail_are_given_back_and_the_first_stays(config):
    made = engine(config)
    served = Served(made)
    request, _ = served.begin("long", tokens(600, 5))
    served.forward([request], [CHUNK])
    while request.num_computed_tokens < 600:
        count = min(CHUNK, 600 - request.num_computed_tokens)
        made.go_on(request, count)
        held = made.manager.get_block_ids("long")[1]
        size = next(iter(made.tails.values())).spec.block_size
        first = max(0, request.num_computed_tokens - TAIL + 1) // size
        assert [block > 0 for block in held] == [i < -(-SINKS // size) or i >= first for i in range(len(held))]
        served.forward([request], [count])
    assert served.equal


def test_a_prefix_whose_first_tokens_are_gone_is_not_known(config):
    made = engine(config)
    served, text = Served(made), tokens(400, 6)
    request, _ = served.begin("one", text)
    served.forward([request], [CHUNK])
    while request.num_computed_tokens < 400:
        count = min(CHUNK, 400 - request.num_computed_tokens)
        made.go_on(request, count)
        served.forward([request], [count])
    first = made.manager.get_block_ids("one")[1][0]
    made.manager.free(request)
    again, known = served.begin("again", text)
    assert known == 384
    assert made.manager.get_block_ids("again")[1][0] == first
    made.manager.free(again)
    made.manager.evict_blocks({first})
    assert served.begin("once more", text)[1] == 0


# -- Planted faults -------------------------------------------------------------------------------------------------------
def short(monkeypatch):
    kept = tails.KeptBlocks
    monkeypatch.setattr(tails, "KeptBlocks", lambda of, *, tail, sink: kept(of, tail=tail - 1, sink=sink))


def without_sinks(monkeypatch):
    kept = tails.KeptBlocks
    monkeypatch.setattr(tails, "KeptBlocks", lambda of, *, tail, sink: kept(of, tail=tail, sink=0))


def of_the_neighbour(monkeypatch):
    join = tails.Tail.join
    monkeypatch.setattr(
        tails.Tail, "join", lambda self, batch: replace(of := join(self, batch), kept_table=of.kept_table.roll(1, 0))
    )


def stale(monkeypatch):
    """What a request keeps after it was put off stays as others left it."""
    slots = tails.Tail.slots

    def nowhere(self):
        found = slots(self)
        return found if len(found) != 64 else torch.full_like(found, -1)

    monkeypatch.setattr(tails.Tail, "slots", nowhere)


@pytest.mark.parametrize("plant", [short, without_sinks, of_the_neighbour, stale])
def test_a_planted_fault_is_seen(config, monkeypatch, plant):
    plant(monkeypatch)
    served, _ = scenario(engine(config))
    assert not served.equal
