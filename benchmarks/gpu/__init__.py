"""Everything that needs an NVIDIA GPU, measured in one call: `python -m haarkv.benchmarks.gpu OUT`."""
