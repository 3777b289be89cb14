"""What the daemon reported, as plain values that every screen is drawn from."""
