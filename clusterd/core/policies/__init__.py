"""Policies by name: the default pipeline, and what it is measured against."""

from __future__ import annotations

from clusterd.core.policies.default import Default
from clusterd.core.view import Policy

POLICIES: dict[str, type[Policy]] = {"default": Default}
