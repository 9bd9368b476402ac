"""Learned keys on the NPU: as long as their first stretch, and refused beyond."""

import pytest
import torch
from npu_checked import CONFIG as TWO_LAYERS
from npu_learned import learned_spec
from npu_programs import with_pypto
from small_models import resized, small_model

from haarkv.engine.session import Session
from haarkv.executors.npu import NpuExecutor
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.batch import PagedSequences
from haarkv.tq_ops.kv.cache import PagedKVCache

CONFIG = resized(TWO_LAYERS, num_layers=1)
WORDS = r"executor npu stores learned keys of up to 1,024 tokens, and this sequence may have 1,0\d\d; take fewer"


@with_pypto
def test_a_text_beyond_the_first_stretch_is_refused_before_it_begins():
    plan = learned_spec(CONFIG, turning=True).plan(1)
    executor = NpuExecutor(small_model(CONFIG, dtype=torch.bfloat16), "sim")
    session = Session(name="small", config=CONFIG, executor=executor, tokenizer=None, plan=plan)
    session.new_cache(1, 1024)
    with pytest.raises(InputError, match=WORDS):
        session.new_cache(1, 1025)
    cache, paging = PagedKVCache(plan, CONFIG.kv_shapes, num_blocks=9), PagedSequences(9, 128)
    batch = paging.batch([paging.add()], [1040])
    with pytest.raises(InputError, match=WORDS):
        executor.forward(torch.zeros(1040, dtype=torch.int64), batch, cache)
