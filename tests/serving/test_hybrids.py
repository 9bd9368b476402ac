"""Models with layers that keep a state: vLLM keeps those, full attention is packed; texts are compared in `test_soak.py`."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm_configs import assert_refused, configure, write
from vllm_soak import STAND_IN

from haarkv.engine import plans
from haarkv.models.catalog import find_model, read_config
from haarkv.serving.serve import _stored_as
from haarkv.serving.vllm_plugin import TAIL
from haarkv.serving.vllm_plugin.backend import RotatedAttentionBackend, with_content
from haarkv.serving.vllm_plugin.kv_choice import is_of_draft, shape_signature, state_layers
from haarkv.serving.vllm_plugin.pages import OwnPages

CONFIG = json.loads((find_model("tiny-hybrid") / "config.json").read_text(encoding="utf-8"))
MTP = {"method": "mtp", "num_speculative_tokens": 2}


@pytest.fixture(autouse=True)
def with_a_stand_in(monkeypatch):
    """vLLM looks at an architecture in a process of its own."""
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(STAND_IN)))))


@pytest.mark.slow
def test_layers_with_a_state_stay_with_vllm_and_the_drafts_are_packed(tmp_path):
    config = configure(write(tmp_path / "model", CONFIG), speculative_config=MTP, enable_prefix_caching=False)
    assert state_layers(config.model_config) == (0, 1, 2)
    assert shape_signature(config) == plans.shape_signature(read_config("tiny-hybrid"))
    assert _stored_as(config) == (
        "K and V of 1 layers are kept in tq4: 264 bytes a token, 3.88 times less than BF16; the states of the other 3 by vLLM "
        "itself"
    )
    assert config.speculative_config.attention_backend == AttentionBackendEnum.CUSTOM
    assert is_of_draft(config, "mtp.layers.0.self_attn.attn")
    assert not is_of_draft(config, "model.layers.3.self_attn.attn")


@pytest.mark.slow
def test_what_was_not_tried_with_states_is_refused(tmp_path):
    folder, states = write(tmp_path / "model", CONFIG), "layers that keep a state"
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    reason = f"speculative decoding by ngram is not supported with {states}; by mtp it is"
    assert_refused(folder, reason, speculative_config=ngram)
    prefixes = f"on a CPU vLLM cannot keep prefixes with drafts and {states}; give --no-enable-prefix-caching"
    assert_refused(folder, prefixes, speculative_config=MTP, enable_prefix_caching=True)
    tail = f"a tail in BF16 was not tried with {states}; leave it out"
    assert_refused(folder, tail, additional_config={TAIL: 8})


@pytest.mark.vllm_short
@pytest.mark.parametrize("states", [True, False])
def test_beside_states_packed_pages_are_all_of_one_size(monkeypatch, states):
    """The size that a layer's own formats need is K's and V's of one token and KV head."""
    shape = {"block_size": 128, "num_kv_heads": 2, "head_size": 128, "dtype": torch.bfloat16}
    packed = {f"layers.{i}": with_content(FullAttentionSpec(**shape), size) for i, size in ((3, 132), (7, 260))}
    state = MambaSpec(block_size=128, shapes=((8, 64),), dtypes=(torch.float32,))
    specs = packed | ({"layers.0": state} if states else {})
    layers = {name: SimpleNamespace(get_attn_backend=lambda: RotatedAttentionBackend) for name in packed}
    layers["layers.0"] = SimpleNamespace(get_attn_backend=lambda: None)
    worker = OwnPages()
    worker.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    pages = worker._equal_pages(specs)
    assert pages["layers.7"] == packed["layers.7"]
    assert pages["layers.3"] == (packed["layers.7"] if states else packed["layers.3"])
    assert pages.get("layers.0") == (state if states else None)
