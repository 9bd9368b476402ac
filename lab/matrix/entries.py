"""What a matrix compares: caches of ours and of others, and groups that are full when they come.

What others published was written here after their papers and code: each format's docstring says what was assumed. Others run
on the model as it is; ours on the balanced one, as they generate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from haarkv.tq_ops import formats
from haarkv.tq_ops.errors import InputError
from haarkv.tq_ops.formats import Field, KVFormat
from haarkv.tq_ops.formats.learned import learned_bits
from haarkv.tq_ops.kv.plan import KVPlan
from lab.rivals import oscar

OURS, OTHERS = "ours", "others"
BY_LAYER = "layers:"
DEFAULT = "auto"
"""The cache that a model gets where none is named, with a tail and sinks of its own."""


@dataclass(frozen=True)
class Entry:
    """One cache of a matrix.

    Attributes:
        label: in tables and figures.
        kv: its formats, as `formats.parse` takes them; or `layers:B`: formats chosen layer by layer, K apart from V, that take
            B bits a value without what stays in BF16.
        whose: `OURS` or `OTHERS`.
    """

    label: str
    kv: str
    whose: str

    @property
    def needs_learning(self) -> bool:
        """Whether its formats need a text to learn from."""
        return not self.is_chosen and (self.kv == oscar.NAME or formats.needs_calibration(self.kv))

    @property
    def budget(self) -> float | None:
        """Bits a value of a cache that is chosen layer by layer."""
        return float(self.kv.removeprefix(BY_LAYER)) if self.kv.startswith(BY_LAYER) else None

    @property
    def is_chosen(self) -> bool:
        """Whether its formats are chosen for the model, by the text of the default."""
        return self.kv == DEFAULT or self.budget is not None

    @property
    def balanced(self) -> bool:
        """Whether it runs on the balanced model: ours do as they generate, others on the model as it is."""
        return self.whose == OURS and not self.needs_learning and not self.is_chosen


_OURS = {
    "tq2": "tq2", "tq3": "tq3", "tq4": "tq4", "tq5": "tq5", "tq6": "tq6", "tq8": "tq8",
    "K tq5, V tq4": "k=tq5,v=tq4", "K tq6, V tq4": "k=tq6,v=tq4", "K q8_0, V tq4": "k=q8_0,v=tq4",
    "learned K 2, V tq3": "k=lr2,v=tq3", "learned K 3, V tq3": "k=lr3,v=tq3", "learned K 3, V tq4": "k=lr3,v=tq4",
    "learned K 4, V tq3": "k=lr4,v=tq3", "learned K 4, V tq4": "k=lr4,v=tq4", "learned K 5, V tq4": "k=lr5,v=tq4",
    "learned K 5, V tq5": "k=lr5,v=tq5",
    "the default": DEFAULT,
    **{f"by layer, {bits} bits": f"{BY_LAYER}{bits}" for bits in ("2.75", "3.25", "3.75", "4.25", "5.25")},
}  # fmt: skip
_OTHERS = {
    "llama.cpp q8_0": "q8_0", "llama.cpp q4_0": "q4_0", "llama.cpp q4_0, turned": "q4_0_rot", "tq3_0": "tq3_0",
    "tbq4_0": "tbq4_0", "FP8": "fp8_e4m3", "KIVI 4, groups of 64": "kivi4_g64", "KIVI 2, groups of 64": "kivi2_g64",
    "KVarN k4v4": "kvarn4", "KVarN k4v2": "k=kvarn4,v=kvarn2", "KVarN k2v2": "kvarn2", "OSCAR": oscar.NAME,
    "ManthanQuant": "manthan3", "vLLM TurboQuant 4bit_nc": "vllm_nc4", "vLLM TurboQuant k8v4": "k=fp8_e4m3,v=vllm_nc4",
}  # fmt: skip
ENTRIES = (
    *(Entry(label, kv, OURS) for label, kv in _OURS.items()),
    *(Entry(label, kv, OTHERS) for label, kv in _OTHERS.items()),
)


def parse_entry(kv: str) -> Entry:
    """The entry of a format; what no entry names is called after itself. Ours are rotated levels, and learned ones.

    Raises:
        InputError: `layers:` without a number of bits.
    """
    entries_by_kv = {entry.kv: entry for entry in ENTRIES}
    if kv in entries_by_kv:
        return entries_by_kv[kv]
    if kv.startswith(BY_LAYER):
        bits = kv.removeprefix(BY_LAYER)
        if not re.fullmatch(r"[0-9]{1,2}(\.[0-9]{1,4})?", bits):
            raise InputError(f"{kv} names no bits a value; write {BY_LAYER}4.25")
        return Entry(f"by layer, {bits} bits", kv, OURS)
    names = [part.split("=")[-1] for part in kv.split(",")]
    ours = any(learned_bits(name) or name in _OURS for name in names)
    return Entry(kv, kv, OURS if ours else OTHERS)


# -- Groups that are full when they come -------------------------------------------------------------------------------------


class FullGroupFormat(KVFormat):
    """A format of groups whose groups are all full when they come: what comes out of it is kept, its bytes are counted.

    So no query sees a token in BF16, and even a group's first token is read as its last one lets it be stored.
    """

    def __init__(self, kv_format: KVFormat) -> None:
        self.kv_format, self.name, self.purpose = kv_format, kv_format.name, kv_format.purpose

    def fields(self, head_dim: int) -> dict[str, Field]:
        return {"restored": Field(torch.float32, (head_dim,))}

    def bytes_per_vector(self, head_dim: int) -> float:
        return self.kv_format.bytes_per_vector(head_dim)

    def quantize(self, x: Tensor, layer: int) -> dict[str, Tensor]:
        """x: [..., n, D], whole groups."""
        groups = x.bfloat16().float().reshape(*x.shape[:-2], -1, self.kv_format.group_tokens, x.shape[-1])
        return {"restored": self.kv_format.dequantize(self.kv_format.quantize(groups, layer), layer).flatten(-3, -2)}

    def dequantize(self, fields: dict[str, Tensor], layer: int) -> Tensor:
        return fields["restored"]


def without_waiting(plan: KVPlan) -> KVPlan:
    """The same, but for groups that are stored as they come."""

    def full_groups(kv_format: KVFormat) -> KVFormat:
        return kv_format if kv_format.group_tokens == 1 else FullGroupFormat(kv_format)

    return replace(plan, layers=tuple((full_groups(k), full_groups(v)) for k, v in plan.layers), recent=None)
