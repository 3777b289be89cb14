"""Handlers of events: hosts, attempts, migrations, trials, recovery and reconciliation."""
