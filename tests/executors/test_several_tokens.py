"""Several new tokens in one forward, where a cache's rings keep room for fewer: nothing changes."""

from functools import lru_cache
from importlib.util import find_spec

import pytest
import torch
from small_models import SMALL, decode, new_paging, prefill, random_tokens, resize_config, small_model

from haarkv.executors import catalog
from haarkv.executors.base import verify
from haarkv.tq_ops.errors import NonFiniteError
from haarkv.tq_ops.kv.cache import PagedKVCache
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.tq_ops.kv.stored import Advance

CONFIG = resize_config(SMALL, num_layers=2, num_heads=4, head_dim=64)
ROOM = 4
TAIL = KVSpec("tq4", tail=5, sink=2)


@lru_cache
def open_executor(name):
    model = small_model(resize_config(CONFIG, num_layers=1) if name == "cuda" else CONFIG)
    if name == "cuda":
        if not find_spec("triton"):
            pytest.skip("Triton is not installed")
        from haarkv.executors.cuda import CudaExecutor

        return CudaExecutor(model, interpreted=not torch.cuda.is_available())
    if name == "onnx":
        pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    return catalog.create(name, model, KVSpec("tq4").plan(model.config.num_layers))


# -- Room for few ----------------------------------------------------------------------------------------------------------
def cache_with(config, spec: KVSpec, room: int | None) -> PagedKVCache:
    return PagedKVCache(spec.plan(config.num_layers), config.kv_shapes, num_blocks=8, block_size=128, room=room)


def run(executor, spec: KVSpec, room: int | None) -> list[torch.Tensor]:
    """Logits of a ragged prompt, of steps, of a second prompt behind it, of a check whose tokens go, and of steps again."""
    cache = cache_with(executor.config, spec, room)
    paging = new_paging(cache)
    ids = [paging.add(), paging.add()]
    tokens = [random_tokens(executor.config, n, seed=n) for n in (40, 3)]
    logits = [prefill(executor, cache, paging, ids, tokens)]
    logits += [decode(executor, cache, paging, ids, [step, 7 - step]) for step in range(2)]
    more = torch.tensor(random_tokens(executor.config, 26, seed=3))
    logits.append(verify(executor, more, paging.batch(ids, [1, 25]), cache))
    advance = Advance(cache, paging, ids, [ROOM, 1])
    logits.append(verify(executor, more[: ROOM + 1], advance.batch, cache))
    advance.keep([1, 1])
    logits += [decode(executor, cache, paging, ids, [step, 5 - step]) for step in range(3)]
    return logits


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("reference", TAIL), ("reference", KVSpec("kivi2")),
        ("cpu", KVSpec("k=tq5,v=tq3", tail=20, sink=1)), ("cpu", KVSpec("tq4", tail=1)),
        pytest.param("onnx", TAIL, marks=pytest.mark.long), pytest.param("cuda", TAIL, marks=pytest.mark.cuda_long),
    ],
    ids=str,
)  # fmt: skip
def test_room_for_few_new_tokens_changes_nothing(name, spec):
    few, all_of_them = (run(open_executor(name), spec, room) for room in (ROOM, None))
    assert all(torch.equal(one, other) for one, other in zip(few, all_of_them, strict=True))


def test_what_is_kept_is_smaller_and_what_is_refused_says_so():
    few, full = cache_with(CONFIG, TAIL, ROOM), cache_with(CONFIG, TAIL, None)
    sides, numbers = 2 * CONFIG.num_layers, 8 * CONFIG.heads.num_kv_heads * 64
    assert full.nbytes - few.nbytes == 2 * sides * numbers * (64 - ROOM)
    paging = new_paging(few)
    batch = paging.batch([paging.add()], [ROOM + 1])
    x = torch.ones(ROOM + 1, CONFIG.heads.num_kv_heads, 64)
    with pytest.raises(ValueError, match="layer 1 keeps room for 4 new tokens of a sequence; store more within `open`"):
        few.view(1, batch).write(x, x)
    assert few.most_undone == ROOM
    with pytest.raises(NonFiniteError), few.open(1, batch):
        few.view(1, batch).write(x * torch.nan, x)
    assert not any(window.vectors.any() for window in few.kv[1].windows)
