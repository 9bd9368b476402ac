"""Every cache of ours and of others on models and texts: `python -m lab.matrix`."""
