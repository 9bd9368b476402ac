"""Emitted C++ of the NPU programs: read as text, and executed on a CPU."""
