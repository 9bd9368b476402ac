"""Costs told from one layer alone rank a model's places as probes through all layers do."""

import re

from lab import choosing


def test_local_costs_are_those_of_probes_up_to_one_factor(capsys):
    assert choosing.main(["tiny", "--learn", "160", "--tokens", "160"]) == 0
    *places, last = capsys.readouterr().out.splitlines()
    assert len(places) == 12
    factor, spread = map(float, re.findall(r"[\d.]+", last)[:2])
    assert 0.3 < factor < 4
    assert spread < 1.0  # 0.4; with the costs of the next layer 2.1
