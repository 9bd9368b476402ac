"""Holding executors against the reference: tolerances and comparisons.

report = validate(reference, candidate, model, prompts, steps, plan)
report.passed, report.first_divergence, report.rows
"""

from haarkv.validation.layers.report import Report
from haarkv.validation.layers.runner import validate

__all__ = ["Report", "validate"]
