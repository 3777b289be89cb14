"""Commands about the daemon and its machine."""
