"""The text that `tiny_qwen3` was trained on and is judged on: the running interpreter's own standard library.

No text is kept in the repository. `held_out.txt` names the files that training never sees (every 20th by sorted path in
Python 3.11); a file that another Python version no longer has is left out, and the caller can see which were read.

`python -m haarkv.models.tiny_qwen3.corpus > held_out.txt` writes the held-out text, for `tq eval` and `tq plan`.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def stdlib_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_names() -> list[str]:
    """Paths, relative to the standard library, of the files kept from training."""
    return (Path(__file__).parent / "held_out.txt").read_text(encoding="utf-8").split()


def read_source(path: Path) -> str:
    """Text of a source file, whatever its encoding."""
    return path.read_text(encoding="utf-8", errors="ignore")


def held_out_texts() -> dict[str, str]:
    """Held-out files that this interpreter has: relative path -> text, in the list's order."""
    root = stdlib_root()
    return {name: read_source(root / name) for name in held_out_names() if (root / name).is_file()}


if __name__ == "__main__":
    # A file ends as the training data's do. The text is UTF-8 whatever the terminal's encoding is.
    sys.stdout.buffer.write("<|endoftext|>".join(held_out_texts().values()).encode())
