"""Final norm and LM head as one PyPTO program."""

from typing import Any

import pypto

from haarkv.tq_ops.npu.kernels.linear import Tiles, hidden_norm


def build(shape: Any, options: dict[str, Any]) -> Any:
    """The jit-decorated head for a `HeadProgram`: tiles of tokens, and within each the vocabulary a piece at a time."""
    hidden_size, eps, vocab, piece, rows = shape.hidden_size, shape.rms_norm_eps, shape.vocab_size, shape.piece, shape.rows
    tiles = Tiles(rows)
    norm_dtype = pypto.DT_FP32 if shape.plus_one else pypto.DT_BF16

    @pypto.frontend.jit(**options)
    def head(
        hidden: pypto.Tensor([pypto.DYNAMIC, hidden_size], pypto.DT_BF16),
        final_norm: pypto.Tensor([1, hidden_size], norm_dtype),
        lm_head: pypto.Tensor([vocab, hidden_size], pypto.DT_BF16),
        logits: pypto.Tensor([pypto.DYNAMIC, vocab], pypto.DT_FP32),
    ):
        for tile in pypto.loop(hidden.shape[0] // rows, name="TILE", idx_name="tile"):
            normed = pypto.tensor([rows, hidden_size], pypto.DT_BF16, "normed")
            for _ in pypto.loop(1, name="NORM", idx_name="i1"):
                normed[:] = hidden_norm(
                    pypto.view(hidden, [rows, hidden_size], [tile * rows, 0]), final_norm, hidden_size, eps
                )
            for i in pypto.loop((vocab + piece - 1) // piece, name="VOCAB", idx_name="i"):
                # The last piece overlaps the one before it where the vocabulary is no multiple.
                begin = (i * piece).min(vocab - piece)
                part = tiles.project(normed, pypto.view(lm_head, [piece, hidden_size], [begin, 0]))
                tiles.elementwise()
                pypto.assemble(pypto.clone(part), [tile * rows, begin], logits)

    return head
