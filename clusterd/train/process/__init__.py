"""A rank as a process: its context, control channel, exit reasons and step log."""
