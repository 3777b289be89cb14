"""A cluster manager for deep-learning labs that have SSH and nothing else."""

__version__ = "0.1.0"
