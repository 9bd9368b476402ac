"""Faults that kernels could have, planted one by one, each of which executing them must find."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import bounds
import torch
from op_tables import LAYER, Case, filled, relative
from ptx_launches import ptx_execution

from haarkv.tq_ops import reference
from haarkv.tq_ops.cuda import ops
from lab.ptx import LaunchFault

_CASE = Case("tq4", 128, 5, 2, 128, (300, 2), (1, 1))


@dataclass(frozen=True)
class PtxFault:
    """A fault.

    Attributes:
        edit: changes the PTX of a kernel.
        kernel: which one.
        capability: the only kind of GPU whose kernel can have it; 0 for any.
        says: what the launch that fails must say; None where the result must be wrong instead.
    """

    edit: Callable[[str], str]
    kernel: str
    says: str | None
    capability: int = 0

    def is_found(self, capability: int) -> bool:
        """Whether executing attention with the fault fails as it should, on a GPU that can have it."""
        if self.capability not in (0, capability):
            return True

        def edit(text: str) -> str:
            if f".entry {self.kernel}(" not in text:
                return text
            result = self.edit(text)
            assert result != text, "nothing was planted"
            return result

        kv_cache, batch = filled(_CASE)
        q = (2 * torch.randn(2, 10, 128, generator=torch.Generator().manual_seed(1))).to(torch.bfloat16)
        theirs = reference.paged_attention(q, kv_cache.view(LAYER, batch), 128**-0.5)
        try:
            with ptx_execution(capability, edit=edit):
                ours = ops.paged_attention(q, kv_cache.view(LAYER, batch), 128**-0.5)
        except LaunchFault as fault:
            return self.says is not None and re.search(self.says, str(fault)) is not None
        return self.says is None and not relative(ours, theirs) <= bounds.LAYER_BF16.attention


def without(pattern: str, times: int = 0) -> Callable[[str], str]:
    """Leaves out the lines that hold a pattern: all, or only the first few."""
    return lambda text: re.sub(rf"(?m)^.*{pattern}.*$", "", text, count=times)


def without_predicate(opcode: str) -> Callable[[str], str]:
    """Instructions without their predicate."""
    return lambda text: re.sub(rf"@!?%p\d+ ({opcode})", r"\1", text)


def _last_barrier(text: str) -> str:
    begin, end = text.rsplit("bar.sync", 1)
    return begin + "//" + end


FAULTS: dict[str, PtxFault] = {
    "stores without their mask": PtxFault(without_predicate(r"st\.global"), "prologue_kernel", "bytes at byte"),
    "loads of scales without their mask": PtxFault(without_predicate(r"ld\.global(?:\.\w+)*\.b16"), "attend_kernel", None),
    "a barrier left out": PtxFault(_last_barrier, "attend_kernel", "with no barrier between"),
    "a copy that nothing waits for": PtxFault(without(r"cp\.async\.wait_group"), "attend_kernel", None),
    "a fence that is left out": PtxFault(
        without(r"fence\.proxy\.async"), "attend_kernel", "with no fence.proxy.async", capability=90
    ),
    "a product that nothing waits for": PtxFault(without(r"wgmma\.wait_group"), "attend_kernel", None, capability=90),
    "a wrong nibble in the look-up": PtxFault(lambda text: text.replace("0x6240", "0x6204"), "attend_kernel", None),
}
