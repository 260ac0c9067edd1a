"""Around main.py's drawing: batches, caches, CUDA graphs, tools and environments."""
