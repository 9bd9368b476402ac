"""GGUF files of Qwen3.5 beside llama.cpp: its logits, its words and its next tokens of the same file."""

import shutil

import pytest
import torch
from family_models import TOKENS, cpu_logits, folder_of, model_vocabulary, saved
from gguf_files import byte_vocabulary, convert

import tq
from haarkv.models.catalog import find_model, load_model, open_source
from haarkv.models.tiny_qwen3.corpus import held_out_texts

__all__ = ["folder_of", "saved"]
llama_cpp = pytest.importorskip("llama_cpp", reason="needs lab/requirements.txt")


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_logits_are_those_of_llama_cpp(folder_of, tmp_path, name):
    """Its cache is FP16. A head of V by another head's decay, or one norm without its 1, is off by the size of a logit."""
    path = convert(folder_of(name), tmp_path / "m.gguf", vocabulary=model_vocabulary(name))
    llama = llama_cpp.Llama(str(path), n_ctx=128, n_batch=64, logits_all=True, n_threads=2, verbose=False)
    llama.eval(TOKENS[:30])
    for token in TOKENS[30:]:
        llama.eval([token])
    theirs = torch.tensor(llama.scores[: len(TOKENS)])
    ours = cpu_logits(load_model(path), TOKENS)
    assert float((ours - theirs).abs().max() / theirs.std()) <= 3e-3
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_words_are_those_of_llama_cpp(folder_of, tmp_path):
    """Marks belong to the letters before them, unlike in Qwen 2."""
    merges = ("Ġ t", "h e", "Ġt he", "e Ì", "1 2", "Ġ Ġ", "Ċ Ċ", "a b")
    special = tuple(f"<|{number}|>" for number in range(36))
    vocabulary = byte_vocabulary(pre="qwen35", merges=merges, special=special, add_bos_token=False)
    path = convert(folder_of("qwen3_5"), tmp_path / "m.gguf", vocabulary=vocabulary)
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ours = open_source(path).words().tokenizer
    texts = ("the theory", "e\u0301\u200d the\n\n  b", "cafe\u0301s 12 123", "क्या है", "it's we'RE", "!!! ?!\r\n", "½² ٣")
    for text in texts:
        theirs = llama.tokenize(text.encode(), add_bos=False, special=True)
        assert ours.encode(text, add_special_tokens=False).ids == theirs, text
    assert [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str("e\u0301s")] == ["eÌģs"]


def test_the_hybrid_that_ships_has_the_same_next_tokens(tmp_path):
    shutil.copytree(
        find_model("tiny-hybrid"), tmp_path / "hybrid", ignore=shutil.ignore_patterns("*.py", "*.md", "__pycache__")
    )
    vocabulary = byte_vocabulary(pre="qwen35", special=("<|end|>",))
    path = convert(tmp_path / "hybrid", tmp_path / "m.gguf", vocabulary=vocabulary)
    text = tq.load("tiny").tokenizer.encode(held_out_texts()["fractions.py"])[:400]
    llama = llama_cpp.Llama(str(path), n_ctx=512, n_batch=256, logits_all=True, n_threads=1, verbose=False)
    llama.eval(text)
    ours = cpu_logits(load_model(path), text)
    assert torch.equal(ours.argmax(-1), torch.tensor(llama.scores[:400]).argmax(-1))
