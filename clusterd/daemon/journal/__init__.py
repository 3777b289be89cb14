"""The journal of events and decisions, and the engine that feeds the scheduler from it."""
