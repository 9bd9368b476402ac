"""Write the files of the contract anew: `python tests/contract/freeze.py`. What changed on purpose is then a diff of data."""

import json
import lzma
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support"), str(Path(__file__).parent)]

from frozen import DATA, TABLES, cache_bytes, calibration_bytes, plan_text, read, same_file, sequence, tiny  # noqa: E402


def write(name, content):
    """JSON with one entry a line, so that a diff names it."""
    rows = (f"{json.dumps(key)}: {_entry(value)}" for key, value in content.items())
    (DATA / f"{name}.json").write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def _entry(value):
    if not isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    return (
        "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(entry, sort_keys=True)}" for key, entry in value.items()) + "\n}"
    )


def write_unless_same(name, content):
    """A binary file; one that says the same in another order stays."""
    path = DATA / name
    if not path.exists() or same_file(lzma.decompress(path.read_bytes())) != same_file(content):
        path.write_bytes(lzma.compress(content, preset=9))


def freeze():
    for name, table in TABLES.items():
        if name == "formats" and "--new-inputs" not in sys.argv and (DATA / "formats.json").exists():
            write(name, table(read(name)))
        else:
            write(name, table())
    session = tiny()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write_unless_same("cache.safetensors.xz", cache_bytes(path, sequence(session), session._origin()))
        write_unless_same("calibration.safetensors.xz", calibration_bytes(path, session))
    (DATA / "plan.json").write_text(plan_text(session), encoding="utf-8")


if __name__ == "__main__":
    freeze()
