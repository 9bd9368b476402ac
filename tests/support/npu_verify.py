"""What a verification by PyPTO is worth: refused if it proves nothing, and never believed alone."""

from __future__ import annotations

from torch import Tensor

from haarkv.tq_ops.npu.program import Program
from haarkv.tq_ops.npu.sim.simulator import Execution

LAST_PASS = "Pass_36_CodegenPreproc"
FIRST_PASS = "tensor_graph"


class VerificationError(AssertionError):
    """A verification that did not happen, or that found a difference."""


def check_verified(
    program: Program, run: Execution, outputs: dict[int, Tensor], goldens: dict[int, Tensor], atol: float
) -> float:
    """Refuse a verification that proves nothing, then compare the data itself.

    PyPTO does not raise when a verification fails, says PASS of zeros, and has let a wrong byte through: its verdict is
    necessary here and never sufficient.

    Args:
        outputs: argument index -> what the program wrote.
        goldens: argument index -> what it should have written; integers must be equal.
        atol: largest absolute difference of floating-point outputs.
    Returns:
        the largest absolute difference found.
    Raises:
        VerificationError: no comparison, a pass that is missing, a failure, an output of zeros only, or a difference.
    """
    if not goldens or set(outputs) != set(goldens):
        raise VerificationError(f"{program.name}: nothing to compare, or not all of it")
    if not run.rows:
        raise VerificationError(f"{program.name}: PyPTO compared nothing")
    passes = {row.pass_name for row in run.rows}
    for needed in (FIRST_PASS, LAST_PASS):
        if not any(name.startswith(needed) for name in passes):
            raise VerificationError(f"{program.name}: {needed} was not verified; only {sorted(passes)}")
    compared = {row.argument for row in run.rows if row.pass_name == FIRST_PASS}
    if not set(goldens) <= compared:
        raise VerificationError(f"{program.name}: arguments {sorted(set(goldens) - compared)} were not compared")
    for row in run.rows:
        if row.verdict != "PASS":
            raise VerificationError(f"{program.name}: {row.pass_name} gives {row.verdict} for argument {row.argument}")
    worst = 0.0
    for index, golden in goldens.items():
        name = program.arguments[index].name
        ours, theirs = outputs[index].double(), golden.double()
        if not ours.isfinite().all():
            raise VerificationError(f"{program.name}: {name} is not finite")
        if not ours.any():
            raise VerificationError(f"{program.name}: {name} is zero throughout, which proves nothing")
        difference = float((ours - theirs).abs().max())
        if difference > (atol if golden.is_floating_point() else 0):
            raise VerificationError(f"{program.name}: {name} is off by up to {difference:.3g}")
        worst = max(worst, difference if golden.is_floating_point() else 0.0)
    return worst
