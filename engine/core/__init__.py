"""What every room uses: types, tensors, ranks, the schema of the config, statistics, files."""
