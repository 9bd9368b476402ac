"""vLLM's own benchmark client, kept loaded: one round of requests for each line of arguments on stdin, one JSON line each.

    python -m haarkv.benchmarks.serve_client

What `vllm bench serve` runs, without loading it again for each round; what it prints goes to stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from haarkv.benchmarks.serve_process import Child
from haarkv.tq_ops.errors import InputError


class Client(Child):
    """The client in a process of its own."""

    def __init__(self, log: Path) -> None:
        super().__init__(["-m", "haarkv.benchmarks.serve_client"], log, piped=True)

    def round(self, args: list[str]) -> dict[str, object]:
        """Run one round to its end; what the client would save.

        Raises:
            InputError: the client ended, with what it said last.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(args) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise InputError(f"the benchmark client ended: {self.reason()}")
        result: dict[str, object] = json.loads(answer)
        return result


def main() -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as run
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    answers, sys.stdout = sys.stdout, sys.stderr
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for line in sys.stdin:
        result = run(parser.parse_args(json.loads(line)))
        answers.write(json.dumps(result, default=float) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
