"""Limit by which a test counts as hung."""

from __future__ import annotations

import os

HANG_S = float(os.environ.get("HANG_S", "600"))
"""Seconds of waiting after which a test fails.

Not a measurement of speed: on a machine that is busy with other work everything takes many times as long.
"""
