"""Limit by which a test counts as hung."""

from __future__ import annotations

HANG_S = 600.0
"""Seconds of waiting after which a test fails.

Not a measurement of speed: on a machine that is busy with other work everything takes many times as long.
"""
