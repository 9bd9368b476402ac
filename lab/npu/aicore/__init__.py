"""Below PyPTO's interpreter: the C++ that it emits, compiled for the host and executed task by task.

PyPTO's interpreter computes on graphs. It never sees the tile operations of the headers that an NPU runs. Here the emitted
kernel functions are compiled against those headers and against the CPU backend of pto-isa, and called with the attributes
that PyPTO's own scheduler gives them, over one image of the device's memory.
"""
