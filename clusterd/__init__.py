"""Cluster manager for deep-learning jobs on hosts reached by SSH."""

__version__ = "0.1.0"
