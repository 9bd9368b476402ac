"""The decoder as ONNX graphs, their export, and what Ascend's ATC compiles."""
