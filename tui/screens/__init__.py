"""The screens: queue, job, fleet, decisions, events, log."""
