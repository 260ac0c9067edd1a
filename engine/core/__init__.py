"""What every package uses: types, tensors, ranks, the schema of the config, statistics, files."""
