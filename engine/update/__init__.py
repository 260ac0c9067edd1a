"""Around main.py's update: the optimizer, other losses, the head in blocks, shards."""
