"""Faults that kernels could have, planted one by one, each of which executing them must find."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from lab.ptx.launches import executed
from op_tables import LAYER, Case, filled, relative
from lab.ptx import LaunchFault

from haarkv.tq_ops import reference
from haarkv.tq_ops.cuda import ops, quantize
from haarkv.validation import bounds

_CASE = Case("tq4", 128, 5, 2, 128, (300, 2), (1, 1))


@dataclass(frozen=True)
class Planted:
    """A fault.

    Attributes:
        edit: changes the PTX of a kernel.
        kernel: which one.
        far: whether the cache reaches beyond 2**31 bytes.
        capability: the only kind of GPU whose kernel can have it; 0 for any.
        says: what the launch that fails must say; None where the result must be wrong instead.
    """

    edit: Callable[[str], str]
    kernel: str
    says: str | None
    far: bool = False
    capability: int = 0

    def found(self, given: Any) -> bool:
        """Whether executing attention with the fault fails as it should."""

        def edit(text: str) -> str:
            if f".entry {self.kernel}(" not in text:
                return text
            changed = self.edit(text)
            assert changed != text, "nothing was planted"
            return changed

        if self.far:
            made, batch, q = given.far_batch(1)
        else:
            made, batch = filled(_CASE)
            q = (2 * torch.randn(2, 10, 128, generator=torch.Generator().manual_seed(1))).to(torch.bfloat16)
        theirs = reference.paged_attention(q, made, LAYER, batch, 128**-0.5)
        try:
            with executed(given.capability, edit=edit):
                ours = ops.paged_attention(q, made, LAYER, batch, 128**-0.5)
        except LaunchFault as fault:
            return self.says is not None and re.search(self.says, str(fault)) is not None
        return self.says is None and not relative(ours, theirs) <= bounds.LAYER_BF16.attention


@dataclass(frozen=True)
class Refused:
    """A fault that does not compile."""

    found: Callable[[Any], bool]


def _layer_is_a_constant(given: Any) -> bool:
    """Layer 1 as a constant of the kernel, on which `.to` fails: what a launch asked for before it was left unspecialized."""
    kept = quantize.quantize_kernel
    quantize.quantize_kernel = triton.jit(kept.fn)
    made, batch = filled(_CASE)
    kv = torch.zeros(2, 2, 128)
    try:
        with executed(given.capability):
            ops.append(kv, kv, made, 1, batch, ops.new_fault(torch.device("cpu")))
    except Exception as error:
        return "'to'" in str(error) or "has no attribute" in str(error) or "CompilationError" in type(error).__name__
    finally:
        quantize.quantize_kernel = kept
    return False


def without(pattern: str, times: int = 0) -> Callable[[str], str]:
    """Leaves out the lines that hold a pattern: all, or the first so many."""
    return lambda text: re.sub(rf"(?m)^.*{pattern}.*$", "", text, count=times)


def unmasked(opcode: str) -> Callable[[str], str]:
    """Instructions without their predicate."""
    return lambda text: re.sub(rf"@!?%p\d+ ({opcode})", r"\1", text)


def _in_32_bits(text: str) -> str:
    """Every product that feeds an address reckoned in int32, and widened then."""

    def cut(found: re.Match[str]) -> str:
        wide, (to, a, b, *rest) = found[2] == "lo.s64", found[3].split(", ")
        lines = [f"cvt.u32.u64 first, {a}; cvt.u32.u64 second, {b}" if wide else f"mov.b32 first, {a}; mov.b32 second, {b}"]
        lines += ["mul.lo.s32 first, first, second", "cvt.s64.s32 product, first", f"add.s64 {to}, product, {(*rest, '0')[0]}"]
        return "{ .reg .b32 first, second; .reg .b64 product; " + "; ".join(lines) + "; }"

    return re.sub(r"(mul|mad)\.(lo\.s64|wide\.s32)\s+(%rd\d+, %\w+, %\w+(?:, \S+)?);", cut, text)


def _last_barrier(text: str) -> str:
    begin, end = text.rsplit("bar.sync", 1)
    return begin + "//" + end


FAULTS: dict[str, Planted | Refused] = {
    "the layer as a constant": Refused(_layer_is_a_constant),
    "block times stride in 32 bits": Planted(
        _in_32_bits, "attend_kernel", "does not fit an int32 that feeds an address", far=True
    ),
    "stores without their mask": Planted(unmasked(r"st\.global"), "rotate_kernel", "bytes at byte"),
    "loads of scales without their mask": Planted(unmasked(r"ld\.global(?:\.\w+)*\.b16"), "attend_kernel", None),
    "a barrier left out": Planted(_last_barrier, "attend_kernel", "with no barrier between"),
    "a copy that nothing waits for": Planted(without(r"cp\.async\.wait_group"), "attend_kernel", None),
    "a fence that is left out": Planted(
        without(r"fence\.proxy\.async"), "attend_kernel", "with no fence.proxy.async", capability=90
    ),
    "a product that nothing waits for": Planted(without(r"wgmma\.wait_group"), "attend_kernel", None, capability=90),
    "a wrong nibble in the look-up": Planted(lambda text: text.replace("0x6240", "0x6204"), "attend_kernel", None),
}
