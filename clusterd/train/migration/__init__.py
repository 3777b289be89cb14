"""Live migration on the ranks: source side, target side, and state snapshots."""
