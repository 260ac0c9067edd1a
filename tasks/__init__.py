"""Tasks beside Countdown: one file each, found by its name (`task.name: gsm8k`)."""
