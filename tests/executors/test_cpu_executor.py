"""The executor `cpu`: its text, what it refuses, and life without a compiler."""

from __future__ import annotations

import re

import pytest
import torch
from op_tables import every_table
from small_models import SMALL, new_cache, new_paging, prefill, random_tokens, small_model

from haarkv.engine.generation import GenerationRequest, generate
from haarkv.executors.cpu import CpuExecutor
from haarkv.executors.reference import ReferenceExecutor
from haarkv.tq_ops import reference
from haarkv.tq_ops.cpu import build, library
from haarkv.tq_ops.cpu.ops import CpuOps
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec

MODEL = small_model(SMALL)


def greedy(executor, kv: str | KVSpec) -> list[list[int]]:
    prompts = [random_tokens(SMALL, n, seed=n) for n in (1, 21, 9)]
    cache = new_cache(SMALL, kv, num_blocks=24)
    done, _ = generate(
        executor, cache, new_paging(cache), GenerationRequest(prompts=prompts, max_new_tokens=8, max_context=64, chunk=13)
    )
    return [completion.token_ids for completion in done]


def logits_after_prompts(model, ops):
    """Logits [24, vocab] fp32 after as many prompts."""
    cache = new_cache(SMALL, num_blocks=120)
    paging = new_paging(cache)
    prompts = [random_tokens(SMALL, 30, seed=seed) for seed in range(24)]
    return prefill(ReferenceExecutor(model, ops), cache, paging, [paging.add() for _ in prompts], prompts).float()


@every_table
def test_in_bf16_logits_are_as_near_to_unrounded_ones_as_the_references(table):
    """How far the two are from each other is chance: one level that falls to the other side of a boundary moves all logits."""
    model, fp32_model = small_model(SMALL, dtype=torch.bfloat16), small_model(SMALL)
    for (_, wide), (_, narrow) in zip(fp32_model.weights.named_tensors(), model.weights.named_tensors(), strict=True):
        wide.copy_(narrow)
    exact = logits_after_prompts(fp32_model, reference)
    ours, theirs = ((logits_after_prompts(model, ops) - exact).norm() for ops in (table.open(), reference))
    # Measured: 1.01 where sums are of FP32 numbers, 1.07 where they are of integers.
    assert ours <= 1.15 * theirs


def test_another_isa_is_refused():
    if build.compiler():
        with pytest.raises(InputError, match="no kernels for 'sse9'; choose from portable"):
            CpuOps("sse9")


# -- Without the kernels -----------------------------------------------------------------------------------------------
@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """The library is looked for in an empty folder."""
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "_kernels.so")
    library.load.cache_clear()
    yield tmp_path / "_kernels.so"
    library.load.cache_clear()


@pytest.mark.parametrize("content", [None, b"no library"])
def test_without_the_kernels_it_says_how_to_build_them(elsewhere, content):
    if content:
        elsewhere.write_bytes(content)
    with pytest.raises(library.KernelsMissingError, match=r"run `python -m haarkv\.tq_ops\.cpu\.build`") as refusal:
        CpuExecutor(MODEL)
    assert "\n" not in str(refusal.value)


def test_without_a_compiler_nothing_is_built(monkeypatch, tmp_path):
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler was found"):
        build.build(tmp_path / "_kernels.so")
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_leaves_what_was_there(monkeypatch, tmp_path):
    target, fails = tmp_path / "_kernels.so", tmp_path / "c++"
    target.write_bytes(b"old")
    fails.write_text("#!/bin/sh\necho 'x.cpp:1: error: nothing works' >&2\nexit 1\n")
    fails.chmod(0o755)
    monkeypatch.setattr(build, "compiler", lambda: str(fails))
    with pytest.raises(build.BuildError, match=re.escape("failed: x.cpp:1: error: nothing works")):
        build.build(target)
    assert target.read_bytes() == b"old"
    assert {path.name for path in tmp_path.iterdir()} == {"_kernels.so", "c++"}
