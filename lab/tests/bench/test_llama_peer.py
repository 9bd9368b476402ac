"""llama.cpp runs the same model: the file that it reads, its logits beside ours, and the command that measures both."""

import json
import os
import signal
from contextlib import closing
from importlib.util import find_spec
from tempfile import TemporaryDirectory

import pytest
import torch
from small_models import CONFIGS, small_model

from haarkv.executors.base import verify
from haarkv.executors.reference import ReferenceExecutor
from haarkv.models.base import new_cache
from haarkv.models.catalog import load_model
from haarkv.models.tiny_qwen3.corpus import held_out_texts
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec
from lab.bench import gguf_file, peers
from lab.bench.llama_process import LlamaError, LlamaKV, LlamaProcess

needs_gguf = pytest.mark.skipif(not find_spec("gguf"), reason="needs lab/requirements.txt: no gguf")


def needs_llama(test):
    skip_unless_installed = pytest.mark.skipif(
        not find_spec("llama_cpp"), reason="needs lab/requirements.txt: no llama-cpp-python"
    )
    return needs_gguf(skip_unless_installed(test))


@needs_gguf
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["gqa5_d128", "gqa5_one_kv_head_d128_tied"])
def test_the_file_holds_every_weight_bit_for_bit(name, dtype, tmp_path):
    from gguf import GGUFReader

    model = small_model(CONFIGS[name], dtype=dtype)
    gguf_file.write(tmp_path / "m.gguf", model)
    read = GGUFReader(tmp_path / "m.gguf")
    tensors = {t.name: t for t in read.tensors}
    config = model.config
    assert len(tensors) == 11 * config.num_layers + 2 + (not config.tied)
    weights_by_name = {
        "blk.1.attn_k.weight": model.weights.layers[1]["k_proj"],
        "blk.2.ffn_norm.weight": model.weights.layers[2]["post_norm"],
    }
    weights_by_name |= {"token_embd.weight": model.weights.embedding, "output_norm.weight": model.weights.final_norm}
    for key, weight in weights_by_name.items():
        kind = "F32" if weight.ndim == 1 or dtype == torch.float32 else "BF16"
        assert tensors[key].tensor_type.name == kind
        raw = torch.from_numpy(tensors[key].data.copy())
        file_weight = raw.view(torch.bfloat16) if kind == "BF16" else raw
        assert torch.equal(file_weight.to(weight.dtype), weight)
    value = {key: field.contents() for key, field in read.fields.items()}
    assert value["qwen3.attention.key_length"] == config.heads.head_dim
    assert value["qwen3.rope.freq_base"] == config.common.attention.rope.theta
    assert (value["qwen3.vocab_size"], value["tokenizer.ggml.model"]) == (config.vocab_size, "no_vocab")


@needs_gguf
def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "_MARGIN", 2**60)
    with pytest.raises(InputError, match="does not fit into"):
        gguf_file.write(tmp_path / "m.gguf", small_model())
    assert not list(tmp_path.iterdir())


def our_logits(model, ids, kv):
    """[tokens, vocab]: after each token of a prompt, step by step behind the first."""
    config, executor = model.config, ReferenceExecutor(model)
    cache, paging = new_cache(config, KVSpec(kv).plan(config.num_layers), sequences=1, tokens=len(ids))
    sequence = paging.add()
    return torch.cat([verify(executor, torch.tensor([i]), paging.batch([sequence], [1]), cache) for i in ids])


@pytest.fixture(scope="module")
def tiny_text():
    from haarkv.engine.loading import load

    return load("tiny").tokenizer.encode("\n".join(held_out_texts().values()))[:120]


def their_logits(model, ids, kind, folder):
    gguf_file.write(folder / "m.gguf", model)
    with closing(LlamaProcess(folder / "m.gguf", 1)) as llama:
        llama.call("open", kind, len(ids))
        return torch.from_numpy(llama.call("logits", kind, ids))


def kl(p, q):
    """Mean KL of two rows of logits, in nats."""
    p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return ((p.exp() * (p - q)).sum(-1)).mean().item()


@needs_llama
def test_in_fp32_its_logits_are_ours(tmp_path, tiny_text):
    """Weights and cache in FP32 on both sides: only the order of sums differs, so that every wrong key or name would show."""
    model = load_model("tiny", "float32")
    ours, theirs = our_logits(model, tiny_text, "fp32"), their_logits(model, tiny_text, LlamaKV("f32", False), tmp_path)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert (ours - theirs).abs().max() < 2e-4  # measured: 2e-5
    assert kl(ours, theirs) < 1e-10  # 2e-12


@needs_llama
@pytest.mark.parametrize("flash", [True, False])
def test_in_bf16_its_logits_are_ours_but_for_rounding(flash, tmp_path, tiny_text):
    """BF16 weights, its cache in FP16, ours in BF16. Both round activations to BF16, though not at the same places: the two
    differ as much from each other as ours does from the same weights in FP32: a KL of 5e-5, 98 % of the largest alike."""
    model = load_model("tiny", "bfloat16")
    ours, theirs = our_logits(model, tiny_text, "bf16"), their_logits(model, tiny_text, LlamaKV("f16", flash), tmp_path)
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.97
    assert kl(ours, theirs) < 3e-4


@needs_llama
def test_what_it_refuses_and_how_it_ends_are_said(tmp_path):
    gguf_file.write(tmp_path / "m.gguf", small_model(dtype=torch.bfloat16))
    with closing(LlamaProcess(tmp_path / "m.gguf", 1)) as llama:
        assert "llama-cpp-python" in llama.about
        assert "CPU" in llama.about
        kind = LlamaKV("q8_0", True)
        llama.call("open", kind, 16)
        with pytest.raises(LlamaError, match="does not decode"):
            llama.call("prompt", kind, [10**6])
        os.kill(llama._process.pid, signal.SIGKILL)
        with pytest.raises(LlamaError, match="SIGKILL"):
            llama.call("prompt", kind, [1, 2, 3])
    (tmp_path / "m.gguf").write_bytes(b"GGUF no more")
    with pytest.raises(LlamaError, match="does not load"):
        LlamaProcess(tmp_path / "m.gguf", 1)


@needs_llama
def test_the_command_measures_it_in_turns_and_leaves_no_file(run, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "TemporaryDirectory", lambda prefix: TemporaryDirectory(prefix=prefix, dir=tmp_path))
    options = ["--kv", "tq4", "--peers", "llama.cpp", "--only", "prompt", "--only", "step"]
    code, out, _ = run("decode", *options, "--json")
    rows = json.loads(out)["rows"]
    names = ["reference tq4", *(f"llama.cpp {kind}" for kind in ("f16 flash", "f16 plain", "q8_0 flash", "q4_0 flash"))]
    assert code == 0
    assert [(r["kind"], r["who"]) for r in rows] == [(kind, name) for kind in ("prompt", "step") for name in names]
    assert all(r["ms"] > 0 for r in rows)
    (q4,) = [r["cost"]["kv"] for r in rows if r["who"] == "llama.cpp q4_0 flash" and r["kind"] == "step"]
    assert q4 == 40 * 2 * 2 * 2 * 32 * 4.5 / 8
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    code, out, _ = run("decode", *options)
    assert code == 0
    assert "step of reference tq4, batch 1, 40 tokens:" in out
    assert "times as fast as llama.cpp" in out
