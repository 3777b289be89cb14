"""The training loop of one rank and what may happen between two steps."""
