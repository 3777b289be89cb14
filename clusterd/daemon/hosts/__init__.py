"""Links to hosts and the translation of agents' messages into events."""
