"""Our quantiser beside gguf's restoring, plain rounding written down apart from it, and files that are written whole."""

import json
from base64 import b64encode

import gguf
import numpy as np
import pytest
import torch
from checkpoints import write_checkpoint
from gguf_files import convert, plain_bytes
from refusals import assert_refused

from haarkv.engine.loading import load
from haarkv.models.catalog import load_model
from haarkv.models.gguf_file import KV_CHOICE
from haarkv.models.gguf_quantize import quantize, write_quantized
from haarkv.models.gguf_source import GGUFSource
from haarkv.tq_ops import reference
from haarkv.tq_ops.errors import InputError
from haarkv.validation.planning import choice_cache
from haarkv.validation.planning.auto import LOSS
from haarkv.validation.planning.choice_cache import saved_choice
from haarkv.validation.planning.moments import importance
from tq.cli import main

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K")
WORST = {"Q8_0": 5e-5, "Q4_0": 8e-3, "Q4_1": 6e-3, "Q5_0": 2e-3, "Q5_1": 1.5e-3, "Q4_K": 6e-3, "Q6_K": 4e-4}
"""Of normal numbers, the squared error that each may leave; a bit of one more halves the step, and quarters this."""


def numbers(rows=12, width=512, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * torch.rand(rows, 1, generator=generator)
    return x, torch.rand(width, generator=generator) ** 4 * 30


def restore_blocks(blocks, kind, shape):
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])).view(shape)


def half(x):
    return np.float32(np.float16(x))


def plain(x, kind):
    """Plain rounding of [R, n], restored: gguf's own, or where it writes none, super-block after super-block."""
    gguf_type = gguf.GGMLQuantizationType[kind]
    if kind not in ("Q4_K", "Q6_K"):
        return torch.from_numpy(gguf.dequantize(gguf.quantize(x.numpy(), gguf_type), gguf_type))
    values = np.empty((x.numel() // 256, 256), np.float32)
    for number, block in enumerate(x.numpy().reshape(-1, 256)):
        subs = block.reshape(-1, 32 if kind == "Q4_K" else 16)
        if kind == "Q4_K":
            low = np.minimum(subs.min(1), 0)
            scale = (subs.max(1) - low) / 15
            d, m = half(scale.max() / 63), half(-low.min() / 63)
            scale = d * (np.round(scale / d) if d else 0 * scale)
            low = -m * (np.round(-low / m) if m else 0 * low)
            ends = 0, 15
        else:
            largest = subs[np.arange(16), np.abs(subs).argmax(1)]
            scale = largest / -32
            d = half(scale[np.abs(scale).argmax()] / -128)
            scale, low, ends = d * np.clip(np.round(scale / d if d else scale), -128, 127), 0 * scale, (-32, 31)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        levels = np.clip(np.round((subs - low[:, None]) * inverse[:, None]), *ends)
        values[number] = (levels * scale[:, None] + low[:, None]).ravel()
    return torch.from_numpy(values).view(x.shape)


def by_block(x, w, y, kind):
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    return ((y - x).square() * w).view(-1, size).double().sum(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_no_block_loses_more_than_by_plain_rounding(kind, weighted):
    x, w = numbers()
    w = w if weighted else torch.ones_like(w)
    blocks = quantize(x, kind, w if weighted else None)
    assert blocks.dtype == torch.uint8
    if kind == "Q4_0" and not weighted:
        each = x.view(len(x), -1, 32)
        w = w * (each.abs() + each.square().mean(-1, keepdim=True).sqrt()).view(x.shape)
    ours = by_block(x, w, restore_blocks(blocks, kind, x.shape), kind)
    theirs = by_block(x, w, plain(x, kind), kind)
    assert bool((ours <= theirs * (1 + 1e-5)).all()), float((ours / theirs).max())
    if kind != "Q8_0":
        assert float(ours.sum()) < (0.8 if weighted else 0.95) * float(theirs.sum())
    if not weighted:
        assert float(ours.sum() / (w * x.square()).sum()) < WORST[kind]
    elif kind != "Q8_0":  # whose scales are gguf's own
        unweighted_loss = by_block(x, w, restore_blocks(quantize(x, kind), kind, x.shape), kind)
        assert float(ours.sum()) < 0.82 * float(unweighted_loss.sum())


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_one_number_of_zeros_and_of_an_outlier(kind):
    x = torch.zeros(6, 256)
    x[1], x[2], x[3, 7], x[4], x[5, ::2] = 0.37, -2.5, 40.0, torch.linspace(0.5, 1.0, 256), -1.0
    values = restore_blocks(quantize(x, kind), kind, x.shape)
    assert bool((values[0] == 0).all())
    assert bool(torch.isfinite(values).all())
    ours, theirs = by_block(x, 1.0, values, kind), by_block(x, 1.0, plain(x, kind), kind)
    assert bool((ours <= theirs * (1 + 1e-5) + 1e-9).all())
    # Importance of nothing: numbers that never meet an input still have scales.
    again = restore_blocks(quantize(x, kind, torch.zeros(256)), kind, x.shape)
    assert float((again - x).abs().max()) <= 40.0


def test_what_cannot_be_quantized_is_refused():
    x, _ = numbers(2, 256)
    x[1, 3] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        quantize(x, "Q4_K")
    x[1, 3] = 1e6
    with pytest.raises(InputError, match="FP16 does not hold"):
        quantize(x, "Q4_0")
    assert restore_blocks(quantize(x, "BF16"), "BF16", x.shape)[1, 3] == torch.tensor(1e6).bfloat16().float()


# -- Files ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file of F32 whose rows take blocks of 256, with a tokenizer."""
    folder = tmp_path_factory.mktemp("m")
    write_checkpoint(folder / "m", config={"hidden_size": 256, "intermediate_size": 288, "head_dim": 64}, dtype=torch.float32)
    vocabulary = plain_bytes(**{"tokenizer.chat_template": "{{ 1 }}", "x.y": True})
    return convert(folder / "m", folder / "m.gguf", "F32", vocabulary=vocabulary)


def test_a_file_says_what_it_said_and_holds_the_types_of_its_mix(whole, tmp_path, capsys):
    out = tmp_path / "q.gguf"
    assert main(["quantize", str(whole), "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    before, after = gguf.GGUFReader(whole), gguf.GGUFReader(out)
    for key, field in before.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.file_type", "general.quantization_version"):
            assert after.fields[key].types == field.types, key
            assert after.fields[key].contents() == field.contents(), key
    assert after.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    types = {tensor.name: tensor.tensor_type.name for tensor in after.tensors}
    assert [tensor.name for tensor in after.tensors] == [tensor.name for tensor in before.tensors]
    assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == "Q4_K"
    assert types["output.weight"] == types["blk.1.attn_v.weight"] == "Q6_K"
    assert types["blk.0.ffn_down.weight"] == "Q5_0"  # rows of 288, of the first layer of two, which has no more bits
    assert types["output_norm.weight"] == "F32"
    assert result["tensors"] == {name: list(types.values()).count(name) for name in dict.fromkeys(types.values())}
    assert result["bytes"] == out.stat().st_size
    for ours, theirs in zip(after.tensors, before.tensors, strict=True):
        y = torch.from_numpy(gguf.dequantize(ours.data, ours.tensor_type).copy())
        x = torch.from_numpy(theirs.data.copy()).view(y.shape)
        assert float((y - x).square().sum() / x.square().sum()) < 7e-3, ours.name
    assert main(["generate", "--model", str(out), "--prompt", "a", "--max-new-tokens", "2", "--no-chat"]) == 0


def test_what_has_its_type_is_copied_and_what_is_quantized_again_is_told(whole, tmp_path, capsys):
    first, second = tmp_path / "1.gguf", tmp_path / "2.gguf"
    assert main(["quantize", str(whole), "--out", str(first)]) == 0
    assert "quantized already" not in capsys.readouterr().err
    assert main(["quantize", str(first), "--out", str(second)]) == 0
    assert "is quantized already (Q4_K, Q5_0, Q6_K, Q8_0)" in capsys.readouterr().err
    assert first.read_bytes() == second.read_bytes()


def test_a_choice_in_the_file_is_taken_if_it_is_of_its_weights(whole, tmp_path, capsys, monkeypatch):
    """It is said once; other weights, and other types of the same, choose for themselves."""
    out, other, again = tmp_path / "q.gguf", tmp_path / "other.gguf", tmp_path / "again.gguf"
    monkeypatch.setattr(choice_cache, "home", lambda: tmp_path / "kv-auto")
    assert main(["quantize", str(whole), "--out", str(out), "--kv-choice"]) == 0
    assert "KV cache chosen in" in capsys.readouterr().out
    choice = GGUFSource(out).kv_choice()
    assert gguf.GGUFReader(out).fields[KV_CHOICE].contents() == b64encode(choice).decode()
    messages = []
    for loss in (0.5, LOSS, LOSS):
        saved_choice(str(out), loss, on_choice=messages.append)
    assert messages == [f"taking the KV cache that is stored in {out}"]
    (file,) = (tmp_path / "kv-auto").iterdir()
    assert file.read_bytes() == choice
    write_quantized(GGUFSource(whole), other, "q8_0", choice=choice)
    write_quantized(GGUFSource(other), again, "q8_0")
    assert GGUFSource(other).kv_choice() == choice
    assert GGUFSource(again).kv_choice() == b""
    for path in (other, again):
        assert saved_choice(str(path)) is None


def test_importance_is_the_mean_square_of_what_a_matrix_is_given(whole):
    session = load(str(whole), kv="bf16", executor="reference", balance=False, allow_collapse=True)
    ids = torch.tensor([5, 77, 5, 130, 9, 200, 31])
    importances = importance(session, [ids[:4], ids[4:]])
    model = load_model(whole)
    layer = model.weights.layers[0]
    x = reference.rms_norm(model.weights.embedding[ids], layer["input_norm"], model.config.layers[0].norm.eps)
    torch.testing.assert_close(importances["model.layers.0.self_attn.q_proj.weight"], x.square().mean(0), rtol=1e-5, atol=0)
    assert importances["model.layers.1.mlp.down_proj.weight"].shape == (288,)
    assert set(importances) == {name for name, tensor in model.weights.named_tensors() if tensor.ndim == 2} - {
        "model.embed_tokens.weight"
    }


def test_an_interrupted_run_leaves_nothing(whole, tmp_path, monkeypatch):
    out = tmp_path / "q.gguf"
    out.write_bytes(b"old")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("haarkv.models.gguf_quantize.quantize", interrupt)
    assert main(["quantize", str(whole), "--out", str(out)]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["q.gguf"]
    assert out.read_bytes() == b"old"


def test_what_cannot_be_written_is_one_line(whole, tmp_path, capsys):
    for args, words in (
        ([str(whole), "--out", str(tmp_path / "q.gguf"), "--type", "q2"], "no such type of weights: q2"),
        ([str(whole), "--out", str(whole)], "the model itself"),
        (["tiny", "--out", str(tmp_path / "q.gguf")], "tiny is no .gguf file; llama.cpp's convert_hf_to_gguf.py"),
        ([str(whole), "--out", str(tmp_path / "none" / "q.gguf")], "none"),
    ):
        assert_refused((main(["quantize", *args]), *capsys.readouterr()), words)
    assert not list(tmp_path.iterdir())
