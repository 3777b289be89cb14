"""Execution of decisions: launches, stops, migrations."""
