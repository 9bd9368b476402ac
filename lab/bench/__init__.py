"""Others' engines beside ours, and measurements that are not made every day: `python -m lab.bench NAME`."""
