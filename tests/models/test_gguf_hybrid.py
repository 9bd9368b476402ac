"""GGUF files of Qwen3.5: the model of the folder that they were written from, and llama.cpp's logits of the same file."""

from functools import cache

import bounds
import gguf
import pytest
import torch
from gguf_files import byte_vocabulary, convert
from transformers_judge import saved_random

from haarkv.engine.plans import shape_of
from haarkv.executors.base import verify
from haarkv.executors.cpu import CpuExecutor
from haarkv.models.caches import new_cache
from haarkv.models.catalog import load_model, read_config, source_of
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.kv.plan import KVSpec

SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
MODELS = {"dense": ("Qwen3_5Text", {}), "experts": ("Qwen3_5MoeText", EXPERTS)}
VOCABULARY = byte_vocabulary(pre="qwen35", special=tuple(f"<|{number}|>" for number in range(38)))
TOKENS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders that transformers wrote, by name, each written once."""
    return cache(lambda name: saved_random(tmp_path_factory.mktemp(name), MODELS[name][0], SHAPE | MODELS[name][1]))


def logits(model):
    cache, paging = new_cache(model.config, KVSpec("fp32").plan(4), sequences=1, tokens=64)
    return verify(CpuExecutor(model), TOKENS, paging.batch([paging.add()], [len(TOKENS)]), cache)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_folder_it_was_written_from(saved, tmp_path, name):
    ours, theirs = load_model(convert(saved(name), tmp_path / "m.gguf", vocabulary=VOCABULARY)), load_model(saved(name))
    assert shape_of(ours.config) == shape_of(theirs.config)
    for (of, one), (other_of, other) in zip(ours.weights.named(), theirs.weights.named(), strict=True):
        assert of == other_of
        exact = not of.endswith(("A_log", "norm.weight"))  # those went through exp, or through 1 + w
        torch.testing.assert_close(one, other, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_llama_cpp(saved, tmp_path, name):
    """Its cache is FP16. A head of V by another head's decay, or one norm without its 1, is off by the size of a logit."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs the peers extra")
    path = convert(saved(name), tmp_path / "m.gguf", vocabulary=VOCABULARY)
    llama = llama_cpp.Llama(str(path), n_ctx=128, n_batch=64, logits_all=True, n_threads=2, verbose=False)
    llama.eval(TOKENS[:30].tolist())
    for token in TOKENS[30:].tolist():
        llama.eval([token])
    theirs = torch.tensor(llama.scores[: len(TOKENS)])
    ours = logits(load_model(path))
    assert float((ours - theirs).abs().max() / theirs.std()) <= 3e-3
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_words_are_those_of_llama_cpp(saved, tmp_path):
    """Marks belong to the letters before them, unlike in Qwen 2."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs the peers extra")
    merges = ("Ġ t", "h e", "Ġt he", "e Ì", "1 2", "Ġ Ġ", "Ċ Ċ", "a b")
    special = tuple(f"<|{number}|>" for number in range(36))
    vocabulary = byte_vocabulary(pre="qwen35", merges=merges, special=special, add_bos_token=False)
    path = convert(saved("dense"), tmp_path / "m.gguf", vocabulary=vocabulary)
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ours = source_of(path).words().tokenizer
    texts = ("the theory", "e\u0301\u200d the\n\n  b", "cafe\u0301s 12 123", "क्या है", "it's we'RE", "!!! ?!\r\n", "½² ٣")
    for text in texts:
        theirs = llama.tokenize(text.encode(), add_bos=False, special=True)
        assert ours.encode(text, add_special_tokens=False).ids == theirs, text
    assert [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str("e\u0301s")] == ["eÌģs"]


@pytest.mark.parametrize("name", MODELS)
def test_blocks_multiply_as_what_is_restored_from_them(saved, tmp_path, name):
    path = convert(saved(name), tmp_path / "m.gguf", "Q8_0", vocabulary=VOCABULARY)
    kept, restored = load_model(path, keep_blocks=True), load_model(path)
    assert kept.weights.nbytes < restored.weights.nbytes / 2
    theirs = logits(restored)
    assert (logits(kept) - theirs).norm() <= bounds.BLOCK_LOGITS["float32"] * theirs.norm()


def test_layers_that_predict_several_tokens_are_not_read(saved, tmp_path):
    plain = convert(saved("dense"), tmp_path / "plain.gguf", vocabulary=VOCABULARY)
    writer_of = gguf.GGUFWriter.write_header_to_file

    def with_one_more(writer, *given):
        writer.add_tensor("blk.4.nextn.eh_proj.weight", torch.zeros(64, 128).numpy())
        writer.add_tensor("blk.4.attn_norm.weight", torch.ones(64).numpy())
        return writer_of(writer, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_one_more)
        extra = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
        path = convert(saved("dense"), tmp_path / "m.gguf", vocabulary=VOCABULARY, extra=extra)
    assert read_config(path) == read_config(plain)
    assert torch.equal(logits(load_model(path)), logits(load_model(plain)))


def test_qwen3_next_is_refused_by_its_name(saved, tmp_path):
    path = convert(saved("experts"), tmp_path / "m.gguf", vocabulary=VOCABULARY)
    path.write_bytes(path.read_bytes().replace(b"qwen35moe", b"qwen3next"))
    with pytest.raises(InputError, match="is a qwen3next with experts model"):
        read_config(path)
