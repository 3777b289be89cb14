"""Keys and typed commands carried out against the daemon."""
