"""A run's life: loaded, resumed, saved, logged, ended; and what a user's mistake costs."""
