"""Run every op of every op table against the reference; exit code 1 if a case fails.

python -m lab.bench.contract                       test all tables that run here
python -m lab.bench.contract --share 2/8           the second of eight processes that share the cases

Without an NVIDIA GPU, table `cuda` runs in Triton's interpreter where TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))
from op_contract import suite
from op_contract.suite import TABLES, Table

from haarkv.tq_ops.table import OP_NAMES


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="lab.bench.contract", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="append", choices=[table.name for table in TABLES], help="repeatable [default: all]")
    parser.add_argument("--op", action="append", choices=OP_NAMES, help="repeatable [default: all]")
    parser.add_argument("--threads", type=int, help="CPU threads [default: torch's own]")
    parser.add_argument("--share", type=_share, default=(1, 1), metavar="K/N", help="every N-th case only, from the K-th on")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    args = parser.parse_args(argv)
    if args.threads is not None and args.threads < 1:
        parser.error("--threads must be at least 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    tables = [table for table in TABLES if not args.table or table.name in args.table]
    ops = args.op or OP_NAMES
    runnable_tables = []
    for table in tables:
        if reason := table.missing():
            print(f"{table.name}: skipped, {reason}", file=sys.stderr)
        else:
            runnable_tables.append(table)
    if not runnable_tables:
        print("none of these tables runs here", file=sys.stderr)
        return 2
    return _test(runnable_tables, ops, args.share, args.json)


def _share(text: str) -> tuple[int, int]:
    first, _, total = text.partition("/")
    if not (first.isdecimal() and total.isdecimal() and 1 <= int(first) <= int(total)):
        raise argparse.ArgumentTypeError(f"write it as K/N with 1 <= K <= N, not {text!r}")
    return int(first), int(total)


def _test(tables: Sequence[Table], ops: Sequence[str], share: tuple[int, int], as_json: bool) -> int:
    failures = 0
    for table in tables:
        cases = [case for case in suite.cases(table) if case.op in ops][share[0] - 1 :: share[1]]
        wrong = 0
        for case, finding in suite.run(table, cases):
            wrong += not finding.passed
            if as_json:
                print(
                    json.dumps({"table": table.name, "case": str(case), "passed": finding.passed, **asdict(finding)}),
                    flush=True,
                )
            elif not finding.passed:
                why = finding.fault or f"{finding.figure}: {finding.share:.3g} times what honest runs allow"
                print(f"{table.name}: {case}: {why}", flush=True)
        if not as_json:
            print(f"{table.name}: {len(cases) - wrong} of {len(cases)} cases pass", flush=True)
        failures += wrong
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
