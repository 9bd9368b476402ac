"""The decoder as ONNX graphs, and their export."""
