"""Pretrained checkpoints of a folder, each loaded once, and what ours computes from them."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import tq
from haarkv.executors.base import verify
from haarkv.models.base import new_cache
from haarkv.tq_ops.kv.plan import KVSpec

STEPS = 32
TEXT = (
    "A router keeps a table of the networks that it can reach, and for each the neighbour to which a packet goes next. "
    "When a link fails, the neighbours notice that no answer comes, strike the entry, and tell the others. "
)


def pytest_generate_tests(metafunc):
    if "file" in metafunc.fixturenames:
        folder = metafunc.config.getoption("--real")
        files = sorted(Path(folder).glob("*.gguf")) if folder else []
        metafunc.parametrize("file", files, ids=lambda path: path.stem, scope="module")


@pytest.fixture(scope="module")
def session(file):
    return tq.load(file, executor="cpu", kv="fp32", dtype="float32", balance=False, keep_blocks=False)


def text_ids(session, count):
    ids = session.encode([TEXT * (count // 20)])[0]
    assert len(ids) > count
    return ids[:count]


def ours(session, ids):
    """Logits after each token: a prompt in chunks, and the last STEPS one by one."""
    config = session.executor.config
    cache, paging = new_cache(config, KVSpec("fp32").plan(config.num_layers), sequences=1, tokens=len(ids))
    sequence, rows = paging.add(), []
    ends = [*range(0, len(ids) - STEPS, 256), *range(len(ids) - STEPS, len(ids) + 1)]
    for begin, end in pairwise(ends):
        rows.append(verify(session.executor, torch.tensor(ids[begin:end]), paging.batch([sequence], [end - begin]), cache))
    return torch.cat(rows)
