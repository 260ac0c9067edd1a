"""What every package uses: types, tensors, ranks, the config, statistics, text, files, the hub."""
