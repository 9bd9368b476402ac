"""GGUF files of Qwen3.5: the model of the folder that they were written from."""

import bounds
import gguf
import pytest
import torch
from gguf_files import convert
from hybrid_files import MODELS, TOKENS, VOCABULARY, logits_of, saved

from haarkv.engine.plans import shape_of
from haarkv.models.catalog import load_model, read_config
from haarkv.tq_ops.errors import InputError

__all__ = ["saved"]


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_folder_it_was_written_from(saved, tmp_path, name):
    ours, theirs = load_model(convert(saved(name), tmp_path / "m.gguf", vocabulary=VOCABULARY)), load_model(saved(name))
    assert shape_of(ours.config) == shape_of(theirs.config)
    for (of, one), (other_of, other) in zip(ours.weights.named(), theirs.weights.named(), strict=True):
        assert of == other_of
        exact = not of.endswith(("A_log", "norm.weight"))  # those went through exp, or through 1 + w
        torch.testing.assert_close(one, other, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_multiply_as_what_is_restored_from_them(saved, tmp_path, name):
    path = convert(saved(name), tmp_path / "m.gguf", "Q8_0", vocabulary=VOCABULARY)
    kept, restored = load_model(path, keep_blocks=True), load_model(path)
    assert kept.weights.nbytes < restored.weights.nbytes / 2
    theirs = logits_of(restored, TOKENS)
    assert (logits_of(kept, TOKENS) - theirs).norm() <= bounds.BLOCK_LOGITS["float32"] * theirs.norm()


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
    assert torch.equal(logits_of(load_model(path), TOKENS), logits_of(load_model(plain), TOKENS))


def test_qwen3_next_is_refused_by_its_name(saved, tmp_path):
    path = convert(saved("experts"), tmp_path / "m.gguf", vocabulary=VOCABULARY)
    path.write_bytes(path.read_bytes().replace(b"qwen35moe", b"qwen3next"))
    with pytest.raises(InputError, match="is a qwen3next with experts model"):
        read_config(path)
