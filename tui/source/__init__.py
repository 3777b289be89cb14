"""Sources of the interface's data: a daemon's socket or a recording."""
