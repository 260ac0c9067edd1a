"""What is measured and kept of completions: metrics, evaluations, the log of completions."""
