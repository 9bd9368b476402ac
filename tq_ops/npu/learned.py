"""Learned coordinates as the programs take them: what leads into the domain of learned nibbles and out of it; no PyPTO here.

Each of the four is a matrix that holds all KV heads, one behind the other, so one program serves every layer: what differs
between layers and heads is data.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from haarkv.codebooks.learned import STAGES
from haarkv.tq_ops.formats import KVFormat
from haarkv.tq_ops.formats.learned import GAINS
from haarkv.tq_ops.formats.rotated import Coordinates

MEAN, SHARES, WEIGHTS, LIFT, OWNED = range(5)
"""Order of the rows of `numbers`, H of each; of `OWNED`, H a stage."""
TRIES = len(GAINS)
"""How often a row of `numbers` repeats itself: the sizes at which a vector is tried lie side by side."""


def coordinates_of(kv_format: KVFormat, head_dim: int, layer: int) -> Coordinates | None:
    """Learned coordinates of a format in a layer, None of any other format."""
    described = kv_format.description(head_dim)
    coordinates = described.transform.coordinates if described else None
    return coordinates(layer) if coordinates else None


def stages_of(of: Coordinates) -> int:
    """The most nibbles that a coordinate owns."""
    return int(of.owners.max()) // of.mean.shape[1] + 1


@cache
def domain_tensors(kv_format: KVFormat, head_dim: int, layer: int, device: torch.device) -> dict[str, Tensor]:
    """What a program takes of a layer's learned coordinates, on its device, the same tensors each time.

    Returns:
        forward: [H * D, D] bf16.
        numbers: [(4 + stages) * H, TRIES * D] fp32: means, shares, weights, lifts (each the same in all columns), and for
            each stage which coordinates own a nibble of it, 1 or 0.
        places: [H * stages * D, N / 2] fp16. A vector's levels, stage after stage, by a head's part of it are its bytes: a
            level has 1 at the byte where it is the low half, 16 where it is the high one.
        rows: [H * N, D] fp32, the coordinate of each nibble, divided by the head's lift. A lift is the power of two above
            the longest row: queries by rows are no longer than the queries, so FP16 holds them.
    """
    coordinates = coordinates_of(kv_format, head_dim, layer)
    assert coordinates is not None, f"{kv_format.name} has no learned coordinates"
    heads, nibbles = coordinates.owners.shape
    stages, half = stages_of(coordinates), nibbles // 2
    lift = torch.ldexp(torch.ones(heads), torch.frexp(coordinates.rows.norm(dim=-1).amax(1)).exponent).unsqueeze(1)
    owned = torch.zeros(heads, STAGES * head_dim).scatter_(1, coordinates.owners, 1.0)[:, : stages * head_dim]
    by_stage = owned.view(heads, stages, head_dim).transpose(0, 1).reshape(-1, head_dim)
    places = torch.zeros(heads, stages * head_dim, half)
    nibble = torch.arange(nibbles)
    places[torch.arange(heads).unsqueeze(1), coordinates.owners, nibble % half] = torch.where(nibble < half, 1.0, 16.0)
    tensors = {
        "forward": coordinates.forward.flatten(0, 1).to(torch.bfloat16),
        "numbers": torch.cat(
            [coordinates.mean, coordinates.shares, coordinates.weights, lift.expand(-1, head_dim), by_stage]
        ).repeat(1, TRIES),
        "places": places.flatten(0, 1).half(),
        "rows": (coordinates.rows / lift.unsqueeze(-1)).flatten(0, 1),
    }
    return {name: tensor.to(device).contiguous() for name, tensor in tensors.items()}
