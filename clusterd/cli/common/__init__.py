"""Shared parts of the commands: output, following a job, arguments, shell completion."""
