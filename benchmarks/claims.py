"""Published headlines of the systems whose formats live here, each with the arithmetic that confirms or refutes it.

python -m haarkv.benchmarks.claims

Every figure is computed in seconds from this project's formats, codebooks and shapes; nothing is looked up. What each headline
says, and where, stands in docs/claims.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from haarkv.benchmarks.quantizers import (
    best_uniform,
    distortion,
    gaussian,
    mean_cosine,
    reach_of,
    round_trip,
    with_outliers,
)
from haarkv.benchmarks.report import print_rows
from haarkv.models.weights import num_parameters
from haarkv.codebooks.lloyd_max import converged_unit_centroids
from haarkv.models.catalog import read_config
from haarkv.tq_ops import formats

Verdict = Literal["confirmed", "refuted", "not reproducible"]
_KIB = 1024


@dataclass(frozen=True)
class Claim:
    """One headline and what became of it.

    Attributes:
        name: in one word or two, for tables and tests.
        headline: as published.
        verdict: follows from `figures`, but for what needs a machine that is not at hand.
        figures: what was computed, by what it is.
    """

    name: str
    headline: str
    verdict: Verdict
    figures: dict[str, float]


def judge(true: bool) -> Verdict:
    """The verdict on a statement that can be computed."""
    return "confirmed" if true else "refuted"


# -- The headlines ------------------------------------------------------------------------------------------------------------


def decode_speed() -> list[Claim]:
    """1.76 times as fast by a smaller cache: its share of what a step reads."""
    config, context = read_config("random:14b"), 512
    # A step reads every weight but the embedding table, of which it reads one row.
    weights = 2 * (num_parameters(config) - config.vocab_size * config.hidden_size)

    def cache_bytes(kv: str) -> float:
        vectors = 2 * config.num_layers * config.heads.num_kv_heads * context
        return vectors * formats.get(kv).bytes_per_vector(config.heads.head_dim)

    now, published = weights + cache_bytes("bf16"), 317.7 / 180
    gains = {kv: now / (weights + cache_bytes(kv)) for kv in ("tq4_seed", "tq4")}
    return [
        Claim(
            "1.76x from the cache",
            "decoding 1.76x as fast with a 4-bit KV cache, 512 tokens",
            judge(published <= now / weights),
            {
                "published ratio": published,
                "weights, GB": weights / 1e9,
                "bf16 cache, GB": cache_bytes("bf16") / 1e9,
                "cache, % of traffic": 100 * cache_bytes("bf16") / now,
                "gain with tq4_seed": gains["tq4_seed"],
                "gain with tq4": gains["tq4"],
                "gain with no cache at all": now / weights,
            },
        ),
        Claim("180 ms a token", "317.7 -> 180 ms a token on Ascend 910B", "not reproducible", {"published ratio": published}),
    ]


def cosine_of_16_levels() -> list[Claim]:
    """A round trip at cosine 0.9999: the best that 16 levels, or any 4 bits, can do."""
    claimed, best = 0.9999, converged_unit_centroids(16)
    limit = math.sqrt(1 - 2.0**-8)
    return [
        Claim(
            "cosine 0.9999",
            "cosine >= 0.9999 of a round trip with 16 levels",
            judge(claimed <= limit),
            {
                "measured, tq4_seed": mean_cosine("tq4_seed", gaussian(128)),
                "measured, tq4": mean_cosine("tq4", gaussian(128)),
                "best 16 levels": math.sqrt(1 - distortion(best)),
                "limit of any 4-bit code": limit,
                "bits that 0.9999 takes": -math.log2(1 - claimed**2) / 2,
            },
        )
    ]


def sizes() -> list[Claim]:
    """132 bytes called four times smaller, 66 bytes called 4.25 bits, 100 bytes called 5.12 times smaller."""
    bf16 = {d: formats.get("bf16").bytes_per_vector(d) for d in (128, 256)}
    seed, packed, tbq4 = (formats.get(kv).bytes_per_vector(128) for kv in ("tq4_seed", "tq4", "tbq4_0"))
    manthan, bits = bf16[256] / formats.get("manthan3").bytes_per_vector(256), 8 * tbq4 / 128
    cosines = {name: mean_cosine("manthan3", x) for name, x in (("Gaussian", gaussian(256)), ("outliers", with_outliers(256)))}
    return [
        Claim(
            "4x smaller",
            "a 4-bit cache, 4x smaller (132 bytes a vector)",
            judge(bf16[128] / seed >= 4),
            {
                "bytes": seed,
                "times smaller": bf16[128] / seed,
                "bits a value": 8 * seed / 128,
                "times smaller, packed (tq4)": bf16[128] / packed,
            },
        ),
        Claim(
            "4.25 bits",
            "66 bytes for 128 values, 4.25 bits a value",
            judge(math.isclose(bits, 4.25)),
            {"bytes": tbq4, "bits a value": bits},
        ),
        Claim(
            "5.12x",
            "5.12x smaller at head_dim 256",
            judge(math.isclose(manthan, 5.12)),
            {"times smaller": manthan},
        ),
        Claim(
            "cosine 0.983",
            "cosine of at least 0.983 with 8 levels and no rotation",
            judge(min(round(cosine, 3) for cosine in cosines.values()) >= 0.983),
            {f"measured, {name}": cosine for name, cosine in cosines.items()},
        ),
    ]


def lossless() -> list[Claim]:
    """A 4-bit cache called lossless: how many vectors come back as they were."""
    x = gaussian(128).bfloat16().float()
    restored = round_trip("tbq4_0", x)
    error = float(((restored - x).norm(dim=-1) / x.norm(dim=-1)).mean())
    equal = int((restored.bfloat16() == x.bfloat16()).all(-1).sum())
    return [
        Claim(
            "lossless",
            "a lossless 4.25-bit KV cache",
            judge(equal == len(x)),
            {"vectors": len(x), "come back as they were": equal, "mean relative error": error},
        )
    ]


def uniform_quantizer() -> list[Claim]:
    """Lloyd-Max at 3 bits called 2.5 times as good as uniform levels."""
    lloyd, best, claimed = distortion(converged_unit_centroids(8)), best_uniform(8), 0.0866
    return [
        Claim(
            "0.03455",
            "Lloyd-Max error of 8 levels: 0.03455",
            judge(math.isclose(lloyd, 0.03455, abs_tol=5e-6)),
            {"error": lloyd},
        ),
        Claim(
            "uniform 0.0866",
            "a uniform quantizer's error is 0.0866, 2.5x as much",
            judge(math.isclose(best, claimed, rel_tol=0.01)),
            {"best uniform": best, "times Lloyd-Max": best / lloyd, "range of 0.0866, sigmas": reach_of(8, claimed)},
        ),
    ]


def residual() -> list[Claim]:
    """2-bit KIVI, 3.67 times smaller: what the ratio counts and what it leaves out."""
    # GPT-2: 12 heads of 64; 31 tokens of prompt and 200 generated. One layer, as the published figures are.
    heads, head_dim, tokens, group, longest = 12, 64, 231, 32, 64
    exact = 2 * heads * head_dim * 4
    packed = sum(heads * formats.get("kivi2", side=side).bytes_per_vector(head_dim) for side in ("k", "v"))
    quantized = (tokens - longest) // group * group + group
    left, history = (tokens - quantized) * exact, quantized * exact
    counted, before = quantized * packed + left, tokens * exact
    return [
        Claim(
            "3.67x counted",
            "1,386 KB -> 378 KB, 3.67x",
            judge(math.isclose(before / counted, 3.67, abs_tol=0.005)),
            {"fp32 cache, KiB": before / _KIB, "counted, KiB": counted / _KIB, "ratio": before / counted},
        ),
        Claim(
            "3.67x held",
            "a KV cache 3.67x smaller",
            judge(before / (counted + history) >= 3.67),
            {
                "2-bit codes and scales, KiB": quantized * packed / _KIB,
                "residual of 39 tokens, KiB": left / _KIB,
                "saved, KiB": (before - counted) / _KIB,
                "copy of the history, KiB": history / _KIB,
                "held in all, KiB": (counted + history) / _KIB,
                "ratio held": before / (counted + history),
                "ratio counted, against 16 bits": before / 2 / counted,
            },
        ),
    ]


def two_bits() -> list[Claim]:
    """OSCAR's 2.28 bits and eight times less memory; KVarN's three to five times the capacity."""
    per, window, published = 128, 64 + 256, 2.28

    def bits(packed: float, context: int, in_bf16: int) -> float:
        return packed + (16 - packed) * in_bf16 / context

    with_16, with_32 = (2 + 2 * number / per for number in (16, 32))
    long, short = 2**17, 4096
    oscar, held = bits(with_16, long, window), bits(with_32, long, window)
    kvarn = 8 * (formats.get("kvarn4", "k").bytes_per_vector(128) + formats.get("kvarn2", "v").bytes_per_vector(128)) / 256
    # The first tile stays as it is, and of the last one half is full on average.
    whole = {context: 16 / bits(kvarn, context, 128 + 64) for context in (short, long)}
    return [
        Claim(
            "2.28 bits counted",
            "2.28 bits a value at a context of 128k",
            judge(round(oscar, 2) == published),
            {"bits at 128k": oscar, "bits without a window": with_16, "bits at 4096": bits(with_16, short, window)},
        ),
        Claim(
            "2.28 bits held",
            "a KV cache of 2.28 bits a value",
            judge(round(held, 2) == published),
            {"bits at 128k": held, "bits without a window": with_32, "bits at 4096": bits(with_32, short, window)},
        ),
        Claim(
            "8x less memory",
            "KV memory reduced by about 8x",
            judge(round(16 / oscar) >= 8),
            {"times smaller at 128k": 16 / oscar, "without a window": 16 / with_16},
        ),
        Claim(
            "3-5x capacity",
            "3 to 5x the KV cache capacity with 4-bit K and 2-bit V",
            judge(all(3 <= times <= 5 for times in whole.values())),
            {
                "bits a value": kvarn,
                "times smaller": 16 / kvarn,
                "with its window, at 4096": whole[short],
                "with its window, at 128k": whole[long],
            },
        ),
    ]


def shown(value: float) -> str:
    """Four digits, and all of a whole number."""
    return str(int(value)) if value == int(value) else f"{value:.4g}"


def claims() -> list[Claim]:
    """Every headline, computed."""
    parts = (decode_speed, cosine_of_16_levels, sizes, lossless, uniform_quantizer, residual, two_bits)
    return [claim for part in parts for claim in part()]


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    args = parser.parse_args(argv)
    for claim in claims():
        if args.json:
            print(json.dumps(asdict(claim)))
        else:
            print_rows(
                f"{claim.name}: {claim.verdict}",
                ["figure", "value"],
                [[name, shown(value)] for name, value in claim.figures.items()],
            )
            print()


if __name__ == "__main__":
    main()
