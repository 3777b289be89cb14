"""Time limits on which daemon and agent must agree."""

from __future__ import annotations

FORK_SERVER_START_TIMEOUT_S = 300.0
"""Longest start of a fork server: importing torch from a cold network file system takes minutes."""
