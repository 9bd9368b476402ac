"""The newest and the first tokens of a sequence in BF16, in blocks that vLLM's own manager keeps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.request import Request
from vllm_configs import configure
from vllm_paged import Shape
from vllm_tails import CHUNK, Engine, TokenKV, alone

from haarkv.models.catalog import TINY
from haarkv.serving.vllm_plugin import SINK as SINK_KEY
from haarkv.serving.vllm_plugin import TAIL as TAIL_KEY
from haarkv.serving.vllm_plugin import kv_choice, limits
from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import synthetic
from haarkv.tq_ops.kv.layer import page_bytes
from haarkv.tq_ops.kv.plan import KVSpec

pytestmark = pytest.mark.vllm_short

SHAPE = Shape(heads=4, block_size=128)
TAIL, SINKS = 40, 3
PAIRS = ("k=lr4,v=tq4", "bf16", "k=tq5,v=tq3")


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return configure(TINY, max_model_len=1024, block_size=SHAPE.block_size)


def engine(config: VllmConfig, pairs=PAIRS, tail: int = TAIL, sinks: int = SINKS, blocks: int = 40) -> Engine:
    calibration = synthetic.calibration(len(pairs), SHAPE.kv_heads, SHAPE.head_dim)
    return Engine([formats.parse(pair, calibration) for pair in pairs], tail, sinks, config, SHAPE, blocks)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 4096, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class CheckedEngine:
    """Requests of an engine, each judged by what a cache of our own makes of its tokens."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.kv, self.right = engine, TokenKV(SHAPE), {}
        self.equal = True

    def begin(self, name: str, token_ids: list[int]):
        """A request, and how many of its tokens were known."""
        self.right[name] = alone(self.engine, self.kv, token_ids)
        request = self.engine.request(name, token_ids)
        return request, self.engine.begin(request)

    def forward(self, requests, counts) -> None:
        at = [request.num_computed_tokens for request in requests]
        outs = self.engine.forward(requests, counts, self.kv)
        for layer, out in enumerate(outs):
            right = [self.right[r.request_id][layer][a : a + n] for r, a, n in zip(requests, at, counts, strict=True)]
            self.equal = self.equal and torch.equal(out, torch.cat(right))

    def steps(self, name: str, count: int) -> Iterator[Request]:
        """A request of this many tokens, chunk by chunk: with the blocks of the next one, and before its forward."""
        request, _ = self.begin(name, tokens(count, count))
        self.forward([request], [CHUNK])
        while (done := request.num_computed_tokens) < count:
            self.engine.go_on(request, min(CHUNK, count - done))
            yield request
            self.forward([request], [min(CHUNK, count - done)])


def scenario(engine: Engine) -> tuple[CheckedEngine, list[int]]:
    """Chunks, unequal lengths, a known prefix, and a request that is put off and comes back; what was known of each."""
    harness, shared = CheckedEngine(engine), tokens(300, 1)
    first, known_first = harness.begin("first", shared)
    harness.forward([first], [CHUNK])
    other, known_other = harness.begin("other", tokens(70, 2))
    engine.go_on(first, 60)
    harness.forward([first, other], [60, CHUNK])
    for counts in ((50, 1), (64, 1), (20, 1), (40, 2)):
        for request, count in zip((first, other), counts, strict=True):
            engine.go_on(request, count)
        harness.forward([first, other], counts)
    second, known_second = harness.begin("second", shared[:280] + tokens(40, 3))
    harness.forward([second], [min(CHUNK, 320 - known_second)])
    engine.go_on(first, 2)
    harness.forward([first], [2])
    engine.manager.free(other)  # put off; its blocks go to the next request
    third, _ = harness.begin("third", tokens(200, 4))
    harness.forward([third], [CHUNK])
    second_try, known_back = harness.begin("back", tokens(70, 2))
    harness.forward([third, second_try][1:], [min(CHUNK, 70 - known_back)])
    for _ in range(2):
        engine.go_on(third, 64)
        harness.forward([third], [64])
    return harness, [known_first, known_other, known_second, known_back]


@pytest.mark.parametrize(("tail", "sinks"), [(TAIL, SINKS), (124, 0), (1, 20), (0, 4)])
def test_attention_is_that_of_a_ring_of_our_own_whoever_has_the_blocks(config, tail, sinks):
    harness, known_tokens = scenario(engine(config, tail=tail, sinks=sinks))
    assert harness.equal
    assert known_tokens == [0, 0, 256, 0]


def test_layers_of_different_pages_share_a_pool_without_padding(config):
    """One group packed and one of tails, in blocks as large as all layers' packed pages side by side."""
    subject = engine(config)
    packed, tails = subject.made.kv_cache_groups
    assert [len(packed.layer_names), len(tails.layer_names)] == [3, 2]
    assert subject.made.num_blocks == 40
    assert {tensor.block_stride for tensor in subject.made.kv_cache_tensors} == {subject.block_bytes}
    sizes = [tail.spec.page_size_bytes for tail in subject.tails.values()]
    assert subject.block_bytes / 2 < sum(sizes) <= subject.block_bytes


def test_blocks_behind_the_tail_are_given_back_and_the_first_stays(config):
    subject = engine(config)
    harness = CheckedEngine(subject)
    for request in harness.steps("long", 600):
        blocks = subject.manager.get_block_ids("long")[1]
        size = next(iter(subject.tails.values())).spec.block_size
        first = max(0, request.num_computed_tokens - TAIL + 1) // size
        assert [block > 0 for block in blocks] == [i < -(-SINKS // size) or i >= first for i in range(len(blocks))]
    assert harness.equal


def test_a_prefix_whose_first_tokens_are_gone_is_not_known(config):
    subject = engine(config)
    harness = CheckedEngine(subject)
    *_, request = harness.steps("one", 400)
    first = subject.manager.get_block_ids("one")[1][0]
    subject.manager.free(request)
    again, known_tokens = harness.begin("again", tokens(400, 400))
    assert known_tokens == 384
    assert subject.manager.get_block_ids("again")[1][0] == first
    subject.manager.free(again)
    subject.manager.evict_blocks({first})
    assert harness.begin("once more", tokens(400, 400))[1] == 0


# -- What is refused ------------------------------------------------------------------------------------------------------


def test_a_tail_on_a_gpu_is_refused(config, monkeypatch):
    monkeypatch.setattr(limits, "_on_cpu", lambda: False)
    monkeypatch.setattr(limits, "kv_plan", lambda _: KVSpec("tq4", tail=8).plan(6))
    assert limits._cache(config) == (
        "a tail or sinks in BF16 are served on CPUs alone; take a cache without, such as k=tq6,v=tq4"
    )


@pytest.mark.parametrize(("key", "value"), [(TAIL_KEY, "124"), (TAIL_KEY, True), (SINK_KEY, 1.5)])
def test_a_tail_is_a_number(key, value):
    with pytest.raises(InputError, match=f"{key} is a number of tokens, not"):
        kv_choice.spec_from({key: value})


# -- How much room it takes -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kv", "tokens"), [("tq2", 16), ("tq3", 16), ("tq4", 32), ("k=tq8,v=tq8", 64)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_blocks_of_a_tail_have_as_many_tokens_as_fit_beside_the_packed_ones(kv, tokens, head_dim):
    packed = 6 * page_bytes(formats.parse(kv), 2, head_dim, 128)
    exact = 6 * page_bytes(kv_choice.exact_pair(), 2, head_dim, 1)
    assert kv_choice.tail_tokens(packed, exact, 128) == tokens
    assert tokens * exact <= packed < 2 * tokens * exact
