"""Live migration as seen by ranks: the source side, the target side, and state snapshots."""
