"""Pretrained checkpoints as GGUF files, beside transformers and llama.cpp on the same files: `make test-real REAL=FOLDER`.

Every `*.gguf` of the folder is read. transformers restores the weights as we do, so FP32 logits can be compared. llama.cpp
computes with the blocks as they are, so that it agrees on most next tokens and not on all.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import tq
from haarkv.executors.base import verify
from haarkv.executors.catalog import block_types, create
from haarkv.models.caches import new_cache
from haarkv.models.catalog import load_model, source_of
from haarkv.tq_ops.kv.plan import KVSpec
from haarkv.validation import bounds

pytestmark = pytest.mark.real
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


def ids_of(session, count):
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


@pytest.mark.parametrize("count", [200, 1700])
def test_fp32_logits_are_those_of_transformers(file, session, count):
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    pytest.importorskip("accelerate", reason="transformers needs it for GGUF files")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = ids_of(session, count)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    found = ours(session, ids)
    relative = float((found - expected).abs().max() / expected.abs().max())
    print(f"{file.stem}, {count} tokens, the last {STEPS} one by one: largest difference {relative:.1e} of the largest logit")
    assert relative <= bounds.TRANSFORMERS_LOGITS


def test_blocks_multiply_as_what_is_restored_from_them(file, session):
    """Of the K-quants, too, which gguf cannot write."""
    ids = torch.tensor(ids_of(session, 24))
    cache, paging = new_cache(session.config, KVSpec("fp32").plan(session.config.num_layers), sequences=3, tokens=24)
    kept = create("reference", load_model(file, keep_blocks=True), KVSpec("fp32").plan(session.config.num_layers), None)
    restored = create("reference", load_model(file), KVSpec("fp32").plan(session.config.num_layers), None)
    of_file = sum(held.nbytes for held in source_of(file).tensors().values())
    assert kept.weights.nbytes <= of_file < restored.weights.nbytes / 3
    rows = [verify(executor, ids, paging.batch([paging.add()], [24]), cache) for executor in (kept, restored)]
    assert torch.equal(*rows)
    fast = create(
        "cpu", load_model(file, keep_blocks=block_types("cpu")), KVSpec("fp32").plan(session.config.num_layers), None
    )
    assert fast.weights.nbytes == kept.weights.nbytes
    found = verify(fast, ids, paging.batch([paging.add()], [24]), cache)
    relative = float((found - rows[0]).norm() / rows[0].norm())
    print(f"{file.stem}: cpu's logits are off by {relative:.1e} of the reference's")
    assert relative <= bounds.BLOCK_LOGITS["float32"]


def test_next_tokens_are_mostly_those_of_llama_cpp(file, session):
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs the peers extra")
    ids = ids_of(session, 600)
    llama = llama_cpp.Llama(str(file), n_ctx=1024, n_batch=512, logits_all=True, n_threads=2, verbose=False)
    llama.eval(ids)
    theirs = torch.tensor(llama.scores[: len(ids)])
    found = ours(session, ids)
    agree = float((found.argmax(-1) == theirs.argmax(-1)).float().mean())
    sure = theirs.softmax(-1).topk(2).values.diff(dim=-1).abs()[:, 0] > 0.1
    agree_where_sure = float((found.argmax(-1) == theirs.argmax(-1))[sure].float().mean())
    print(f"{file.stem}: {agree:.1%} of {len(ids)} next tokens agree, {agree_where_sure:.1%} where llama.cpp is sure")
    assert agree >= 0.97
    assert agree_where_sure >= 0.995
