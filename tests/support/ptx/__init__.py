"""Executes the PTX of a launch on the CPU, every thread of it, and checks each access to memory."""

from ptx.memory import Memory, far
from ptx.run import LaunchFault, execute
from ptx.syntax import Unknown

__all__ = ["LaunchFault", "Memory", "Unknown", "execute", "far"]
