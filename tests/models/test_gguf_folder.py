"""Folders in Hugging Face's format as GGUF files: beside files that another converter wrote, and read again by ourselves."""

import json
import warnings
from functools import cache

import gguf
import numpy as np
import pytest
import torch
from checkpoints import byte_tokenizer, write_checkpoint
from family_models import IN_FILES, save_model
from gguf_files import convert
from refusals import assert_refused
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from haarkv.engine.loading import load
from haarkv.engine.plans import shape_signature
from haarkv.models.catalog import load_model, open_source, read_config
from haarkv.models.gguf_folder import PROBE, special_ids, tokenizer_entries
from haarkv.models.source import Words
from haarkv.models.words import build_words
from haarkv.tq_ops.errors import InputError
from tq.cli import main


def merging(merges=(("a", "b"),), **model):
    state = json.loads(byte_tokenizer().to_str())
    state["model"] |= {"merges": list(merges), **model}
    state["model"]["vocab"] |= {"<|endoftext|>": 256} | {"".join(merge): 257 + at for at, merge in enumerate(merges)}
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def words_in(folder):
    """A byte-level BPE that cuts text as GPT-2 does, and has one merge."""
    merging().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": "{{ 1 }}"}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 256, "bos_token_id": 256}))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    @cache
    def get(name):
        folder = tmp_path_factory.mktemp(name)
        save_model(folder, name)
        return words_in(folder)

    return get


@pytest.mark.parametrize("name", [name for name in IN_FILES if not name.startswith("qwen3_5")])
def test_tensors_and_settings_are_those_of_another_converter(saved, tmp_path, name):
    out = tmp_path / "m.gguf"
    assert main(["quantize", str(saved(name)), "--out", str(out), "--type", "f32"]) == 0
    ours, theirs = gguf.GGUFReader(out), gguf.GGUFReader(convert(saved(name), tmp_path / "theirs.gguf"))
    our_tensors, right = ({entry.name: entry for entry in reader.tensors} for reader in (ours, theirs))
    assert set(our_tensors) == set(right)
    for entry in right:
        assert tuple(our_tensors[entry].shape) == tuple(right[entry].shape), entry
        np.testing.assert_allclose(
            our_tensors[entry].data, right[entry].data, rtol=1e-5 if "rope" in entry else 0, err_msg=entry
        )
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.fields[key].contents() == field.contents(), key
    # And read again by ourselves, it is the folder.
    again, folder = load_model(out), load_model(saved(name))
    assert shape_signature(again.config) == shape_signature(folder.config)
    for (entry, one), (_, other) in zip(again.weights.named(), folder.weights.named(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-7, msg=entry)


def test_the_shipped_model_writes_the_same_text(tmp_path):
    out = tmp_path / "tiny.gguf"
    assert main(["quantize", "tiny", "--out", str(out), "--type", "bf16"]) == 0
    texts = []
    for name in ("tiny", str(out)):
        session = load(name, kv="tq4", executor="cpu")
        texts.append(session.generate("import os\n", max_new_tokens=16).completions[0].token_ids)
    assert texts[0] == texts[1]
    config = read_config(out)
    assert (config.layers, config.eos_token_ids) == (read_config("tiny").layers, (0,))
    for text in (PROBE, "def main(argc):\n    return 2026"):
        assert open_source(out).words().tokenizer.encode(text).ids == open_source("tiny").words().tokenizer.encode(text).ids


def test_a_mix_and_importance_are_as_of_a_file(saved, tmp_path, capsys):
    out, text = tmp_path / "m.gguf", tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 12)
    assert main(["quantize", str(saved("qwen3_moe")), "--out", str(out), "--type", "q4_0", "--imatrix", str(text),
                 "--imatrix-tokens", "512", "--json"]) == 0  # fmt: skip
    result = json.loads(capsys.readouterr().out)
    # Q, K, V, O and three kinds of experts of each layer, and the head; routers are no blocks.
    assert result["by_importance"] == 3 * 7 + 1
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
    assert (types["blk.0.ffn_up_exps.weight"], types["blk.0.ffn_gate_inp.weight"]) == ("Q4_0", "F32")
    session = load(str(out), kv="bf16", executor="cpu")
    assert len(session.generate("a", max_new_tokens=2).completions[0].token_ids) == 2


# -- Tokenizers -----------------------------------------------------------------------------------------------------------


def sentence_pieces(prefix):
    """As transformers converts SentencePiece's: merges by rank, bytes as tokens, `▁` for a space."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c"]
    merges = [("a", "b"), ("▁", "a"), ("c", "a"), ("b", "c"), ("bc", "a"), ("b", "ca")]
    vocabulary = {piece: id for id, piece in enumerate(dict.fromkeys([*pieces, *map("".join, merges)]))}
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


def test_a_file_says_three_ends_beside_those_that_are_known_by_name(tmp_path):
    """Any number may be known by name, and the first that was named stays the first."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<|im_end|>", "<|eot_id|>", "<x>", "<y>", "<z>"])
    words = Words(tokenizer, tmp_path)
    assert special_ids(words, [257, 256, 258, 259, 260], {}, tmp_path) == {"eos": 257, "eot": 259, "eom": 260}
    assert special_ids(words, [256, 257, 258], {}, tmp_path) == {"eos": 256, "eot": 257, "eom": 258}
    with pytest.raises(InputError, match="5 tokens end a text, and a GGUF file names three"):
        special_ids(words, [257, 256, 259, 260, 261], {}, tmp_path)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_is_told_by_scores(tmp_path, prefix):
    words = Words(sentence_pieces(prefix), tmp_path)
    entries = tokenizer_entries(words, 300, {"bos": 1, "eos": 2})
    assert entries["tokenizer.ggml.model"] == "llama"
    assert entries["tokenizer.ggml.token_type"][:4] == [2, 3, 3, 6]
    again = build_words(tmp_path, entries, 300).tokenizer
    for text in ("abca bca  cab\n", "ab", " a bc é"):
        assert again.encode(text).ids == words.tokenizer.encode(text).ids
        theirs = words.tokenizer.decode(words.tokenizer.encode(text).ids)
        assert again.decode(again.encode(text).ids) == (theirs[1:] if prefix else theirs)


def test_a_tokenizer_that_llama_cpp_has_not_is_refused(tmp_path):
    def check_refusal(tokenizer, pre=None):
        tokenizer.pre_tokenizer = pre or tokenizer.pre_tokenizer
        with pytest.raises(InputError, match=r"llama\.cpp has"):
            tokenizer_entries(Words(tokenizer, tmp_path), 300, {})

    assert tokenizer_entries(Words(merging(), tmp_path), 300, {})["tokenizer.ggml.pre"] == "gpt-2"
    check_refusal(
        merging(), pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("(a+)+b"), "isolated"), pre_tokenizers.ByteLevel()])
    )
    check_refusal(merging(), pre_tokenizers.ByteLevel(add_prefix_space=True))
    check_refusal(merging(), pre_tokenizers.Whitespace())
    check_refusal(merging(()))
    check_refusal(merging(ignore_merges=True))  # whole words are no part of GPT-2's way


NORMALIZERS = {
    "NFC": (normalizers.NFC(), "e\u0301 ka\u0308a"), "NFD": (normalizers.NFD(), "\u00e9"),
    "NFKC": (normalizers.NFKC(), "\ufb01"),
    "NFKD": (normalizers.NFKD(), "\u2460"), "Lowercase": (normalizers.Lowercase(), "AB"),
    "StripAccents": (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), "\u00e9"),
    "Strip": (normalizers.Strip(), "  ab "), "Prepend": (normalizers.Prepend("a"), "b"),
    "Replace": (normalizers.Replace("``", "ab"), "``"), "Nmt": (normalizers.Nmt(), "a\u200bb"),
    "spaces": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), "a b"), "none": (None, "ab"),
}  # fmt: skip
"""What tokenizers do to a text before they cut it, by name, and a text that it changes."""


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("name", NORMALIZERS)
def test_what_a_file_does_not_say_of_a_text_is_refused_or_told_of(tmp_path, kind, name):
    normalizer, text = NORMALIZERS[name]
    tokenizer = merging() if kind == "bytes" else sentence_pieces(prefix=False)
    spaces = [] if kind == "bytes" or name == "spaces" else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([normalizer, *spaces]) if normalizer else tokenizer.normalizer
    with warnings.catch_warnings(record=True) as warning_list:
        warnings.simplefilter("always")
        try:
            entries = tokenizer_entries(Words(tokenizer, tmp_path), 300, {})
        except InputError:
            return
    again = build_words(tmp_path, entries, 300).tokenizer
    if again.encode(text).ids == tokenizer.encode(text).ids:
        assert not warning_list
    else:
        [line] = warning_list
        assert f"changes text by {name} before" in str(line.message)
    assert bool(warning_list) == (name in ("NFC", "Replace", "Nmt"))


def test_a_head_of_its_own_is_written_whatever_the_config_says(tmp_path, capsys):
    """transformers takes the head that the weights hold, and so do we: in a folder and in a file made of it."""
    save_model(tmp_path / "m", "qwen3_yarn")
    folder = words_in(tmp_path / "m")
    right = load_model(folder).weights.lm_head
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.warns(UserWarning, match="ties the head to the embedding, and the weights hold another head"):
        model = load_model(folder)
    assert torch.equal(model.weights.lm_head, right)
    assert main(["quantize", str(folder), "--out", str(tmp_path / "m.gguf"), "--type", "f32"]) == 0
    assert "tq: warning: " in capsys.readouterr().err
    assert torch.equal(load_model(tmp_path / "m.gguf").weights.lm_head, right)


def test_what_is_not_written_is_one_line(tmp_path, capsys):
    out = tmp_path / "out" / "m.gguf"
    out.parent.mkdir()
    folder = write_checkpoint(tmp_path / "m")
    byte_words = ["llama.cpp has no name for how it cuts text", "convert_hf_to_gguf.py"]
    other = words_in(write_checkpoint(tmp_path / "n", config={"attention_bias": True, "vocab_size": 300}))
    save_model(tmp_path / "g", "gemma3_scaled")
    gemma_case = words_in(tmp_path / "g"), ["cannot say all"]  # llama.cpp scales by the size of a head
    for name, words in (gemma_case, (folder, byte_words), ("random:0.6b", ["random weights"]), (other, ["attention biases"])):
        assert_refused((main(["quantize", str(name), "--out", str(out)]), *capsys.readouterr()), *words)
    assert not list(out.parent.iterdir())
