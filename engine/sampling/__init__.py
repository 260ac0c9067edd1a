"""From logits to completions: drawing, one file a backend, batches, caches, tools."""
