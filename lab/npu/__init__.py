"""Emitted C++ of the NPU programs: read as text, executed on a CPU, and its instructions counted."""
