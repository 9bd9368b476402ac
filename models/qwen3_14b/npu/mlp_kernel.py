"""The MLP of a layer on one of several ranks, as one PyPTO program: it ends where the ranks add up."""

from typing import Any

import pypto

from haarkv.tq_ops.npu.kernels.linear import Tiles, gated_mlp


def build(part: Any, options: dict[str, Any]) -> Any:
    """The jit-decorated MLP for an `MlpProgram`, tile by tile: norm, gated MLP, and this rank's part of the sum in FP32."""
    hidden_size, intermediate, eps, rows = part.hidden_size, part.intermediate_size, part.rms_norm_eps, part.rows
    tiles = Tiles(rows)
    norm_dtype = pypto.DT_FP32 if part.parts.plus_one else pypto.DT_BF16

    @pypto.frontend.jit(**options)
    def mlp_part(
        hidden: pypto.Tensor([pypto.DYNAMIC, hidden_size], pypto.DT_BF16),
        post_norm: pypto.Tensor([1, hidden_size], norm_dtype),
        gate_proj: pypto.Tensor([intermediate, hidden_size], pypto.DT_BF16),
        up_proj: pypto.Tensor([intermediate, hidden_size], pypto.DT_BF16),
        down_proj: pypto.Tensor([hidden_size, intermediate], pypto.DT_BF16),
        out: pypto.Tensor([pypto.DYNAMIC, hidden_size], pypto.DT_FP32),
    ):
        for tile in pypto.loop(hidden.shape[0] // rows, name="TILE", idx_name="tile"):
            for _ in pypto.loop(1, name="MLP", idx_name="i1"):
                x = pypto.view(hidden, [rows, hidden_size], [tile * rows, 0])
                added = gated_mlp(x, post_norm, gate_proj, up_proj, down_proj, hidden_size, eps, tiles, part.parts.activation)
                tiles.elementwise()
                pypto.assemble(pypto.clone(added), [tile * rows, 0], out)

    return mlp_part
