"""What ONNX graphs are built from."""
