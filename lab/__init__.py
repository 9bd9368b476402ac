"""The laboratory: what the figures in docs rest on, and what no user of the product needs. Start at README.md."""
