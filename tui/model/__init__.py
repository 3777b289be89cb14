"""State reported by the daemon and its rendering as styled lines; imports no widget."""
