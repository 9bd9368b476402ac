"""Pretrained checkpoints as GGUF files, beside transformers on the same files: `make test-real REAL=FOLDER`.

Every `*.gguf` of the folder is read. transformers restores the weights as we do, so FP32 logits can be compared.
"""

import bounds
import pytest
import torch
from real_files import STEPS, ours, pytest_generate_tests, session, text_ids

from haarkv.executors.base import verify
from haarkv.executors.catalog import create, info
from haarkv.models.base import new_cache
from haarkv.models.catalog import load_model, open_source
from haarkv.tq_ops.kv.plan import KVSpec

__all__ = ["pytest_generate_tests", "session"]
pytestmark = pytest.mark.real


@pytest.mark.parametrize("count", [200, 1700])
def test_fp32_logits_are_those_of_transformers(file, session, count):
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    pytest.importorskip("accelerate", reason="transformers needs it for GGUF files")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = text_ids(session, count)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    logits = ours(session, ids)
    relative = float((logits - expected).abs().max() / expected.abs().max())
    print(f"{file.stem}, {count} tokens, the last {STEPS} one by one: largest difference {relative:.1e} of the largest logit")
    assert relative <= bounds.TRANSFORMERS_LOGITS


def test_blocks_multiply_as_what_is_restored_from_them(file, session):
    """Of the K-quants, too, which gguf cannot write."""
    ids = torch.tensor(text_ids(session, 24))
    plan = KVSpec("fp32").plan(session.config.num_layers)
    cache, paging = new_cache(session.config, plan, sequences=3, tokens=24)
    block_executor = create("reference", load_model(file, keep_blocks=True), plan, None)
    dense_executor = create("reference", load_model(file), plan, None)
    file_bytes = sum(tensor.nbytes for tensor in open_source(file).tensors().values())
    assert block_executor.weights.nbytes <= file_bytes < dense_executor.weights.nbytes / 3
    rows = [verify(executor, ids, paging.batch([paging.add()], [24]), cache) for executor in (block_executor, dense_executor)]
    assert torch.equal(*rows)
    fast = create("cpu", load_model(file, keep_blocks=info("cpu").block_types()), plan, None)
    assert fast.weights.nbytes == block_executor.weights.nbytes
    logits = verify(fast, ids, paging.batch([paging.add()], [24]), cache)
    relative = float((logits - rows[0]).norm() / rows[0].norm())
    print(f"{file.stem}: cpu's logits are off by {relative:.1e} of the reference's")
    assert relative <= bounds.BLOCK_LOGITS["float32"]
