"""PyPTO helpers and kernels; each module imports `pypto`."""
