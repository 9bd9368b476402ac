"""PyPTO's interpreter, cost model and compiler in a process of their own."""
