"""Sources of the UI's data: a daemon's socket, or a recording."""
