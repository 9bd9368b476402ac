"""Executes the PTX of a launch on the CPU, every thread of it, and checks each access to memory."""

from ptx.memory import Memory, far
from ptx.parse import Unknown
from ptx.run import LaunchFault, execute

__all__ = ["LaunchFault", "Memory", "Unknown", "execute", "far"]
