"""The scheduler under a virtual clock: same events, same decisions, other effects."""
