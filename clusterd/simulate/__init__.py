"""The scheduler under a virtual clock: the same events and decisions, with simulated effects."""
