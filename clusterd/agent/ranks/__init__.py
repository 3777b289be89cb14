"""Attempts on this host: launching, watching and stopping ranks."""
