"""Models some of whose layers attend to a window or keep a state: vLLM keeps these, and full attention is packed.

Texts of models with states are compared in `test_soak.py`.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm_configs import WINDOW, WINDOW_MODEL, configure, write
from vllm_drafts import random_checkpoint
from vllm_judge import prompts
from vllm_server import Answer, serving
from vllm_soak import look_up_stand_ins

from haarkv.engine import plans
from haarkv.models.catalog import TINY, find_model, read_config
from haarkv.models.weights import checkpoint_tensors
from haarkv.serving.serve import _stored_as
from haarkv.serving.vllm_plugin.backend import RotatedAttentionBackend, with_content
from haarkv.serving.vllm_plugin.kv_choice import is_of_draft, kv_plan, shape_signature, sliding_layers, state_layers
from haarkv.serving.vllm_plugin.pages import OwnPages, fit_windows

PROMPTS = prompts(12, (130, 200, 300, 700))
NEW_TOKENS = 24


def checkpoint(folder: Path, **overrides: object) -> str:
    """Random weights, the same for every config."""
    specs = checkpoint_tensors(read_config(write(folder, WINDOW_MODEL)))
    shapes = {name.removesuffix(".weight"): spec.shape for name, spec in specs.items()}
    random_checkpoint(folder, {**WINDOW_MODEL, **overrides}, shapes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    return str(folder)


def error(ours: list[Answer], theirs: list[Answer]) -> float:
    """Of the median answer: how far log-probabilities of the likeliest tokens are apart at most, on average over positions.

    Positions after the same tokens count; one where no token is among the likeliest of both is infinitely far.
    """
    means = []
    for a, b in zip(ours, theirs, strict=True):
        gaps = []
        for place, (one, other) in enumerate(zip(a.candidates, b.candidates, strict=True)):
            if a.token_ids[:place] == b.token_ids[:place]:
                logprobs = dict(one), dict(other)
                shared = logprobs[0].keys() & logprobs[1].keys()
                gaps.append(max((abs(logprobs[0][token] - logprobs[1][token]) for token in shared), default=math.inf))
        means.append(statistics.mean(gaps))
    return statistics.median(means)


@pytest.mark.vllm_server
def test_the_text_is_that_of_vllms_own_cache_and_that_of_another_window_is_not(tmp_path, record_property):
    model, other = checkpoint(tmp_path / "model"), checkpoint(tmp_path / "other", sliding_window=WINDOW - 16)
    answers, tokens = {}, {}
    for name, folder, kv in (("bf16", model, "bf16"), ("tq8", model, "tq8"), ("tq4", model, "tq4"), ("other", other, "bf16")):
        with serving(tmp_path / f"{name}.log", kv=kv, model=folder, cache_bytes=2**25) as server:
            answers[name] = server.complete(PROMPTS, NEW_TOKENS)
            # The second time prompts are known; a window's first blocks are gone.
            assert server.complete(PROMPTS, NEW_TOKENS) == answers[name] or name == "bf16"
            tokens[name] = server.kv_tokens()
    off = {name: error(answers["bf16"], answers[name]) for name in ("tq8", "tq4", "other")}
    record_property("errors", str(off))
    record_property("tokens", str(tokens))
    print(off, tokens)
    assert off["tq8"] < off["tq4"] < off["other"] / 4
    assert tokens["tq4"] > 1.2 * tokens["bf16"]


@pytest.mark.vllm_short
def test_layers_with_a_window_stay_with_vllm(tmp_path):
    config = configure(write(tmp_path / "model", WINDOW_MODEL))
    assert sliding_layers(config.model_config) == (0, 1, 3, 4)
    assert config.attention_config.backend_per_kind == {"sliding_window": AttentionBackendEnum.CPU_ATTN}
    assert [k.name for k, _ in kv_plan(config).layers] == ["bf16", "bf16", "tq4"] * 2


@pytest.mark.vllm_short
@pytest.mark.parametrize(("content", "block"), [(68, 32), (132, 64), (256, 128), (20, 32)])
def test_blocks_of_windows_are_as_large_as_fits_a_packed_page(content, block):
    """K and V of one token and KV head of 64 in bf16 take 256 bytes; `content` packed."""
    shape = {"block_size": 128, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    packed, sliding = with_content(FullAttentionSpec(**shape), content), SlidingWindowSpec(**shape, sliding_window=64)
    specs = fit_windows({"full": packed, "window": sliding})
    assert specs == {"full": packed, "window": SlidingWindowSpec(**{**shape, "block_size": block}, sliding_window=64)}
    assert specs["window"].page_size_bytes <= packed.page_size_bytes or block == 32


@pytest.mark.slow
def test_layers_with_a_state_stay_with_vllm_and_the_drafts_are_packed(tmp_path, monkeypatch):
    look_up_stand_ins(monkeypatch)
    hybrid = json.loads((find_model("tiny-hybrid") / "config.json").read_text(encoding="utf-8"))
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    config = configure(write(tmp_path / "model", hybrid), speculative_config=drafts, enable_prefix_caching=False)
    assert state_layers(config.model_config) == (0, 1, 2)
    assert shape_signature(config) == plans.shape_signature(read_config("tiny-hybrid"))
    assert _stored_as(config) == (
        "K and V of 1 layers are kept in tq4: 264 bytes a token, 3.88 times less than BF16; the states of the other 3 by vLLM "
        "itself"
    )
    assert config.speculative_config.attention_backend == AttentionBackendEnum.CUSTOM
    assert is_of_draft(config, "mtp.layers.0.self_attn.attn")
    assert not is_of_draft(config, "model.layers.3.self_attn.attn")


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
