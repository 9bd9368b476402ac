"""Where things lie in the repository: its root, and the source files of the package, room by room."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
# Each room uses those before it.
ORDER = ["codebooks", "tq_ops", "models", "executors", "engine", "validation", "benchmarks", "serving", "tq"]


def sources():
    """Every Python file of the package."""
    for room in ORDER:
        yield from sorted((ROOT / room).rglob("*.py"))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "tq" else ("haarkv", *parts)).removesuffix(".__init__")
