"""The metadata of a safetensors file, which the library reads only from a file by its path."""

from __future__ import annotations

import json


def metadata_of(content: bytes) -> dict[str, str]:
    """The metadata of a safetensors file's bytes.

    Raises:
        ValueError: they are none, or they are cut off inside the header.
    """
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise ValueError(f"it is truncated or no safetensors file ({len(content)} bytes)")
    header = json.loads(content[8 : 8 + length])
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise ValueError("its header is not that of a safetensors file")
    return {str(key): str(value) for key, value in metadata.items()}
