"""Everything that needs an NVIDIA GPU, measured in one call: `python -m lab.bench.gpu OUT`."""

from __future__ import annotations

import json
from typing import Any

from haarkv.benchmarks.report import RESULTS


def predictions() -> list[dict[str, Any]]:
    """What was computed before a GPU was measured, from counted instructions and bytes: a row a kernel and case."""
    lines = (RESULTS.parent / "gpu_predictions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
