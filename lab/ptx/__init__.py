"""Executes the PTX of a launch on the CPU, every thread of it, and checks each access to memory."""

from lab.ptx.memory import Memory, far
from lab.ptx.run import LaunchFault, execute
from lab.ptx.syntax import Unknown

__all__ = ["LaunchFault", "Memory", "Unknown", "execute", "far"]
