"""The agent process: its socket, sessions, verbs and housekeeping."""
