"""Sign vectors that make a Walsh-Hadamard transform a random-looking rotation, as other implementations fixed them."""

from __future__ import annotations

import numpy as np

# llama.cpp's TQ3_0: one vector for every block of 32.
TQ3_0 = "+-++--+-++-+-+--+--++-+--+++--+-"


def sign_tables() -> dict[str, str]:
    """Every sign vector by name, `+` or `-` a coordinate.

    TBQ4_0's two are drawn from numpy's generator, whose stream may change between its versions: hence a shipped table.
    """
    generator = np.random.default_rng(42)
    first, second = (generator.choice([-1, 1], 128) for _ in range(2))
    tables = {"tbq4_0/before": first, "tbq4_0/after": second}
    return {"tq3_0": TQ3_0, **{name: "".join("+-"[int(s < 0)] for s in signs) for name, signs in tables.items()}}
