"""The cycles of the cost model: a point is read from the simulator's report, and shown beside bf16."""

import json

from lab.bench.npu import Point, report


def test_each_variant_is_compared_with_bf16_of_its_case():
    points = [Point(v, 1, 512, c, 3, 2**20, {"cube": 1.0}, 0.1) for v, c in (("tq4", 50), ("bf16", 200))]
    points.append(Point("tq4", 8, 512, 70, 3, 2**20, {}, 0.1))
    found = report(points)
    assert [cells[4] for cells in found.tables[0].rows] == ["0.25", "1.00", "–"]
    line = json.loads(found.line())
    assert (line["context"], line["kv"], len(line["points"])) == ([512], ["tq4", "bf16"], 3)
