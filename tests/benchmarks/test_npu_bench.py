"""The saved cycles of the cost model belong to the sources that were costed."""

import re

from haarkv.benchmarks.npu import program_hash


def test_the_sources_that_decide_the_cycles_are_found():
    assert re.fullmatch("[0-9a-f]{12}", program_hash())
