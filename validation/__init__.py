"""Holding executors against the reference: tolerances and comparisons.

report = validate(reference, candidate, model, prompts, steps, plan)
report.passed, report.first_divergence, report.rows
"""

from validation.report import Report
from validation.runner import validate

__all__ = ["Report", "validate"]
