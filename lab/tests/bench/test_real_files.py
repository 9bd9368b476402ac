"""Pretrained GGUF files beside llama.cpp: `make test-peers REAL=FOLDER`.

llama.cpp computes with the blocks as they are, so that it agrees on most next tokens and not on all.
"""

import pytest
import torch
from real_files import ours, pytest_generate_tests, session, text_ids

__all__ = ["pytest_generate_tests", "session"]


def test_next_tokens_are_mostly_those_of_llama_cpp(file, session):
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs lab/requirements.txt")
    ids = text_ids(session, 600)
    llama = llama_cpp.Llama(str(file), n_ctx=1024, n_batch=512, logits_all=True, n_threads=2, verbose=False)
    llama.eval(ids)
    theirs = torch.tensor(llama.scores[: len(ids)])
    our_logits = ours(session, ids)
    agree = float((our_logits.argmax(-1) == theirs.argmax(-1)).float().mean())
    sure = theirs.softmax(-1).topk(2).values.diff(dim=-1).abs()[:, 0] > 0.1
    agree_where_sure = float((our_logits.argmax(-1) == theirs.argmax(-1))[sure].float().mean())
    print(f"{file.stem}: {agree:.1%} of {len(ids)} next tokens agree, {agree_where_sure:.1%} where llama.cpp is sure")
    assert agree >= 0.97
    assert agree_where_sure >= 0.995
