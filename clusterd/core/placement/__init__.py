"""Placement: the exact devices and CPU cores of each grant."""
