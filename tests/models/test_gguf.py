"""GGUF files: the same model as the folder that they were written from, of every family; what cannot be is one line."""

import json
import struct
from pathlib import Path

import gguf
import pytest
import torch
from checkpoints import write_checkpoint
from family_models import IN_FILES, folder_of, model_vocabulary, saved
from gguf_files import byte_vocabulary, convert, header, pieces, text
from refusals import assert_refused
from safetensors.torch import load_file, save_file

import tq
from haarkv.engine.plans import shape_signature
from haarkv.models.catalog import find_model, load_model, model_weight_bytes, open_source, read_config
from haarkv.models.gguf_metadata import llama3_entries
from haarkv.models.rope import inverse_frequencies
from haarkv.models.weights import fingerprint
from haarkv.tq_ops.errors import InputError
from tq.cli import main

__all__ = ["folder_of", "saved"]


@pytest.mark.parametrize("name", IN_FILES)
def test_a_file_is_the_folder_it_was_written_from(folder_of, tmp_path, name):
    folder, path = folder_of(name), convert(folder_of(name), tmp_path / "m.gguf", vocabulary=model_vocabulary(name))
    ours, theirs = load_model(path), load_model(folder)
    assert shape_signature(ours.config) == shape_signature(theirs.config)
    for (tensor_name, one), (other_name, other) in zip(
        ours.weights.named_tensors(), theirs.weights.named_tensors(), strict=True
    ):
        assert tensor_name == other_name
        through = name.startswith(("gemma3", "qwen3_5")) and tensor_name.endswith(("A_log", "norm.weight"))  # exp, or 1 + w
        torch.testing.assert_close(one, other, rtol=1e-6 * through, atol=1e-6 * through, msg=tensor_name)
    for one, other in zip(ours.config.attentions, theirs.config.attentions, strict=True):
        frequencies = inverse_frequencies(one.rope), inverse_frequencies(other.rope)
        torch.testing.assert_close(*frequencies, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_model_in_parts_is_the_model_in_one_file(folder_of, tmp_path, name, kind):
    whole = convert(folder_of(name), tmp_path / "m.gguf", kind, vocabulary=byte_vocabulary())
    first = convert(folder_of(name), tmp_path / "m.gguf", kind, vocabulary=byte_vocabulary(), each=4)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert parts[0] == first
    assert open_source(first).files() == parts
    assert {tensor.file for tensor in open_source(first).tensors().values()} == set(parts)
    for keep in (False, True):
        one, other = (load_model(path, keep_blocks=keep).weights for path in (whole, first))
        assert fingerprint(one.named_tensors()) == fingerprint(other.named_tensors())
        assert model_weight_bytes(first, read_config(first), "float32", keep_blocks=keep) == model_weight_bytes(
            whole, read_config(whole), "float32", keep_blocks=keep
        )
    texts = [
        tq.load(path, kv="bf16", executor="cpu").generate("ab", max_new_tokens=5).completions[0].token_ids
        for path in (whole, first)
    ]
    assert texts[0] == texts[1]
    for path in (whole, first):
        assert main(["quantize", str(path), "--out", str(path.with_suffix(".q8")), "--type", "q8_0"]) == 0
    assert whole.with_suffix(".q8").read_bytes() == first.with_suffix(".q8").read_bytes()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda first, second, third: second,
            ["00002-of-00003.gguf is part 2 of 3", "name the first one", "m-00001-of-00003.gguf"],
        ),
        (lambda first, second, third: second.unlink(), ["m-00002-of-00003.gguf is missing: the model lies in 3 parts"]),
        (lambda first, second, third: (second.unlink(), third.unlink())[0], ["m-00002-of-00003.gguf and 1 more is missing"]),
        (lambda first, second, third: third.write_bytes(second.read_bytes()), ["00003-of-00003.gguf is not part 3 of 3"]),
        (lambda first, second, third: third.write_bytes(third.read_bytes()[:-100]), ["00003-of-00003.gguf", "truncated"]),
        (lambda first, second, third: first.rename(first.with_name("m.gguf")), ["m.gguf is one of 3 parts", "names again"]),
    ],
)
def test_a_model_in_parts_is_refused_by_the_part_that_is_wrong(folder_of, tmp_path, capsys, damage, words):
    convert(folder_of("llama"), tmp_path / "m.gguf", vocabulary=byte_vocabulary(), each=11)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    faulty_part = damage(*parts)
    faulty_part = faulty_part if isinstance(faulty_part, Path) else parts[0]
    code = main(["generate", "--model", str(faulty_part), "--prompt", "a"])
    assert_refused((code, *capsys.readouterr()), *words)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_restored_as_gguf_restores_them(folder_of, tmp_path, kind, dtype):
    path = convert(folder_of("qwen2"), tmp_path / "m.gguf", kind)
    reader = gguf.GGUFReader(path)
    theirs = {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()) for tensor in reader.tensors
    }
    source = open_source(path)
    for ours, name in [
        ("model.embed_tokens.weight", "token_embd.weight"), ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.0.self_attn.k_proj.bias", "blk.0.attn_k.bias"), ("model.norm.weight", "output_norm.weight"),
    ]:  # fmt: skip
        assert torch.equal(source.tensors()[ours].read(dtype), theirs[name].to(dtype)), name


def test_many_rows_are_restored_a_few_at_a_time(folder_of, tmp_path, monkeypatch):
    path = convert(folder_of("llama"), tmp_path / "m.gguf", "Q8_0")
    whole = load_model(path)
    monkeypatch.setattr("haarkv.tq_ops.weight._CHUNK", 7 * 192)
    torch.testing.assert_close(*(dict(model.weights.named_tensors()) for model in (load_model(path), whole)), rtol=0, atol=0)


# -- Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"gemma3.attention.sliding_window_pattern": 2}, [1, 0, 1, 0, 1, 0, 1]),
        ({"gemma3.attention.sliding_window_pattern": [True, True, False, True, True, False, True]}, [1, 1, 0, 1, 1, 0, 1]),
        ({"gemma3.attention.sliding_window": 0}, [0] * 7),
    ],
)
def test_a_gemma_3_may_say_which_layers_have_windows(folder_of, tmp_path, extra, expected):
    kinds = open_source(convert(folder_of("gemma3"), tmp_path / "m.gguf", extra=extra)).settings()["layer_types"]
    assert [kind == "sliding_attention" for kind in kinds] == [bool(is_local) for is_local in expected]


def test_what_a_file_leaves_out_is_what_llama_cpp_takes(folder_of, tmp_path):
    without = [f"llama.{key}" for key in ("attention.key_length", "attention.value_length", "rope.freq_base",
                                          "attention.head_count_kv", "rope.dimension_count")]  # fmt: skip
    settings = open_source(convert(folder_of("llama"), tmp_path / "m.gguf", leave_out=without)).settings()
    assert [settings[key] for key in ("head_dim", "rope_theta", "num_key_value_heads")] == [32, 1e4, 6]


def test_a_llama_with_a_window_is_a_mistral(folder_of, tmp_path):
    config = read_config(convert(folder_of("llama"), tmp_path / "m.gguf", extra={"llama.attention.sliding_window": 64}))
    assert config.model_type == "mistral"
    assert [shape.window for shape in config.kv_shapes] == [64] * 3


@pytest.mark.parametrize(
    ("name", "extra", "words"),
    [
        ("llama", {"llama.attention.value_length": 32}, ["heads of V have 32 channels"]),
        ("llama", {"llama.rope.dimension_count": 32}, ["a part of each head", "0.5"]),
        ("llama", {"llama.attention.head_count": [6, 3]}, ["num_attention_heads"]),
        ("llama", {"llama.attention.head_count": 2**31}, ["num_attention_heads is larger"]),
        ("llama", {"llama.expert_count": 8}, ["llama with experts model"]),
        ("qwen3_yarn", {"qwen3.attention.sliding_window": 64}, ["qwen3 with a sliding window of 64", "of which layers"]),
        ("llama", {"llama.rope.scaling.type": "longrope"}, ["longrope"]),
        ("qwen3_yarn", {"qwen3.rope.scaling.yarn_attn_factor": 0.7}, ["qwen3.rope.scaling.yarn_attn_factor is 0.69"]),
        ("qwen3_yarn", {"qwen3.rope.scaling.novel": 2}, ["qwen3.rope.scaling.novel is 2"]),
        ("llama", {"split.count": 3}, ["m.gguf is one of 3 parts", "its name does not say which"]),
        ("llama", {"llama.block_count": 4}, ["lacks the tensor model.layers.3."]),
        ("llama", {"llama.block_count": 1}, ["holds blk.1.", "does not know"]),
        ("llama", {"llama.feed_forward_length": 256}, ["has shape [320, 192]"]),
        ("llama", {"general.sampling.top_k": "many"}, ["top_k is not a whole number"]),
        ("llama", {"general.sampling.top_p": 3.0}, ["m.gguf: ", "top-p", "3"]),
        ("qwen2", {"tokenizer.ggml.eos_token_id": [0]}, ["eos_token_id"]),
        ("llama", {}, ["m.gguf has no tokenizer"]),
        ("llama", pieces(words=[f"w{i}" for i in range(60)]), ["m.gguf has 321 tokens, and an embedding of 300"]),
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(folder_of, tmp_path, capsys, name, extra, words):
    vocabulary = byte_vocabulary() if extra and "tokenizer.ggml.tokens" not in extra else None
    path = convert(folder_of(name), tmp_path / "m.gguf", extra=extra, vocabulary=vocabulary)
    code = main(["generate", "--model", str(path), "--prompt", "a"])
    assert_refused((code, *capsys.readouterr()), *words)


@pytest.mark.parametrize("factors", [torch.linspace(1, 9, 32), -torch.ones(32)], ids=["ramp", "negative"])
def test_factors_of_rope_that_are_none_of_llama_3s_are_refused(factors, tmp_path):
    with pytest.raises(InputError, match="none of Llama 3's"):
        llama3_entries(tmp_path, factors, 5e5)


def test_qwen3_next_is_refused_by_its_name(folder_of, tmp_path):
    path = convert(folder_of("qwen3_5_moe"), tmp_path / "m.gguf", vocabulary=model_vocabulary("qwen3_5"))
    path.write_bytes(path.read_bytes().replace(b"qwen35moe", b"qwen3next"))
    with pytest.raises(InputError, match="is a qwen3next with experts model"):
        read_config(path)


# -- Damaged files --------------------------------------------------------------------------------------------------------


def tensor(name, offset):
    """The entry of 32 numbers in F32."""
    return text(name) + struct.pack("<IQIQ", 1, 32, 0, offset)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b"GGU", "ends within its header"),
        (b"PK\x03\x04" + bytes(60), "does not begin with GGUF"),
        (header(version=1), "its version is 1"),
        (header(version=3 << 24), "little-endian"),
        (header(count=2**40), "more than any has"),
        (header((2**63).to_bytes(8, "little")), "ends within its header"),
        (header(text("a") + b"\x63\0\0\0"), "kind 99"),
        (header(text("a") + b"\x08\0\0\0" + b"\x02" + bytes(7) + b"\xff\xfe"), "not UTF-8"),
        (
            header(text("a") + b"\x09\0\0\0\x00\0\0\0" + (2**50).to_bytes(8, "little")),
            "a list of 1,125,899,906,842,624 values",
        ),
        (header(text("a") + b"\x09\0\0\0" + (b"\x09\0\0\0" + b"\x01" + bytes(7)) * 9), "kind 9"),
        (header(*[text("a") + b"\x07\0\0\0\x01"] * 2), "two entries 'a'"),
        (header(text("general.alignment") + b"\x04\0\0\0\x03\0\0\0"), "not a power of two"),
        (header(tensors=1) + text("t") + (5).to_bytes(4, "little"), "5 axes"),
        (header(tensors=1) + text("t") + b"\x02\0\0\0" + b"\xff" * 16 + bytes(12), "cannot be"),
        (header(tensors=1) + text("t") + b"\x01\0\0\0" + bytes(8) + bytes(12), "cannot be"),
        (header(tensors=2) + tensor("t", 0) + tensor("t", 0), "there twice"),
        (header(tensors=2) + tensor("t", 0) + tensor("u", 96) + bytes(512), "lie over each other"),
    ],
)
def test_a_damaged_header_is_one_line(tmp_path, capsys, content, words):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert_refused((main(["info", str(path)]), *capsys.readouterr()), "m.gguf", words)


def test_a_type_that_gguf_cannot_restore_is_refused(folder_of, tmp_path):
    path = convert(folder_of("llama"), tmp_path / "m.gguf")
    name = b"blk.1.ffn_up.weight"
    content = bytearray(path.read_bytes())
    at = content.index(name) + len(name) + 4 + 16
    for kind, word in ((99, "type 99"), (26, "I32")):
        content[at : at + 4] = kind.to_bytes(4, "little")
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"up_proj\.weight is stored as {word}, which gguf cannot restore"):
            load_model(path)
    content[at : at + 4] = (12).to_bytes(4, "little")  # Q4_K, whose blocks have 256 numbers
    path.write_bytes(content)
    with pytest.raises(InputError, match="rows of 192 numbers, which are no whole blocks of 256"):
        load_model(path)


# -- Wherever a model is named ----------------------------------------------------------------------------------------------


def test_a_file_says_how_its_model_is_sampled(folder_of, tmp_path, capsys):
    sampling = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    path = convert(folder_of("llama"), tmp_path / "m.gguf", extra=sampling, vocabulary=byte_vocabulary())
    model, few = ["--model", str(path)], ["--prompt", "Spam and eggs, and then spam.", "--executor", "cpu"]
    assert find_model(path) == path
    assert main(["info", str(path)]) == 0, capsys.readouterr().err
    assert main(["generate", *model, *few, "--max-new-tokens", "3"]) == 0, capsys.readouterr().err
    assert "temperature 0.5, top-k 7; from the model's settings" in " ".join(capsys.readouterr().err.split())


# -- Folders of models that read more than text -------------------------------------------------------------------------------
def test_a_model_with_a_vision_part_is_read_without_it(tmp_path):
    """By the names that Gemma 3 has; those of Qwen3.5 are in `test_families`."""
    plain, seeing = write_checkpoint(tmp_path / "plain"), write_checkpoint(tmp_path / "seeing")
    tensors, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    places = ("vision_tower", "model.vision_tower", "multi_modal_projector", "visual")
    whole = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    whole |= {f"{place}.x.weight": torch.ones(2) for place in places}
    save_file(whole, seeing / "model.safetensors")
    (seeing / "config.json").write_text(json.dumps({"model_type": "whole", "text_config": config, "vision_config": {}}))
    torch.testing.assert_close(
        *(dict(load_model(folder).weights.named_tensors()) for folder in (plain, seeing)), rtol=0, atol=0
    )
    save_file(whole | {name: tensor.clone() for name, tensor in tensors.items()}, seeing / "model.safetensors")
    with pytest.raises(InputError, match="twice, also as"):
        load_model(seeing)
