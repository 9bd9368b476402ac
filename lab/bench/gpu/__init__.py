"""Everything that needs an NVIDIA GPU, measured in one call: `python -m lab.bench.gpu OUT`."""
