"""What every package uses: types, tensors, ranks, config, statistics, text, files, own code."""
