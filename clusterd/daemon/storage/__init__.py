"""Data that the head node stores for jobs: workdirs, secrets, logs, training steps."""
