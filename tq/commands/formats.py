"""`tq formats`: every KV format and what it costs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from tq import options
from tq.groups import Command
from tq.options import IntRange
from tq.output import print_sentence, print_table

if TYPE_CHECKING:
    from haarkv.tq_ops.formats import KVFormat


@click.command("formats", cls=Command)
@click.option("--head-dim", type=IntRange(2, 1024), default=128, show_default=True, help="Numbers in one K or V vector.")
@options.json_option
def command(head_dim: int, as_json: bool) -> None:
    """List the KV formats: bits a value, bytes, and what each is for.

    Bytes are for one K or V vector of one KV head, scales included. The ratio says how many times smaller than bf16 it is.
    Formats of other projects are here to compare with: --executor reference and cpu run them, slowly. lr2 to lr5 store keys,
    in coordinates that `tq calibrate` learns of a model.
    """
    from haarkv.tq_ops import formats
    from haarkv.tq_ops.errors import InputError

    formats.get(formats.names()[0]).fields(head_dim)  # refuse what not even the first can hold
    rows: list[dict[str, Any]] = []
    left_out = []
    for name in (*formats.names(), *formats.learned_names()):
        try:
            sides = _sides(name, head_dim)
            size = max(each.bytes_per_vector(head_dim) for each in sides)
        except InputError:
            left_out.append(name)
            continue
        rows.append({
            "name": name, "bits_per_value": 8 * size / head_dim, "bytes_per_vector": size, "ratio": 2 * head_dim / size,
            "purpose": sides[0].purpose, "to_compare": sides[0].to_compare,
        })  # fmt: skip
    if as_json:
        print(json.dumps(rows))
        return
    cells = [
        (
            f"{r['name']}{'*' * r['to_compare']}", f"{r['bits_per_value']:.3f}", f"{r['bytes_per_vector']:.0f}",
            f"{r['ratio']:.2f}x", r["purpose"],
        )
        for r in rows
    ]  # fmt: skip
    print_table(f"head_dim {head_dim}", ["format", "bits/value", "bytes/vector", "vs bf16", "for"], cells)
    print_sentence("* to compare with: --executor reference and cpu run it, slowly; others refuse it")
    print_sentence(
        "without --kv: auto, a cache chosen for the model; above a billion weights k=tq6,v=tq4 with a tail; for toys tq4"
    )
    if left_out:
        print(f"no layout for head_dim {head_dim}: {', '.join(left_out)}")


def _sides(name: str, head_dim: int) -> tuple[KVFormat, ...]:
    """A format as it stores K, and V if it does."""
    from haarkv.tq_ops import formats

    if name in formats.learned_names():
        return (formats.get(name, "k", formats.unlearned([(1, head_dim)])),)
    return formats.get(name, "k"), formats.get(name, "v")
