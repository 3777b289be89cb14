"""Training loop of one rank and the events between two steps."""
