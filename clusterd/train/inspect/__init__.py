"""Analyses of a script's model, loss and optimizer that rule out plans which would train it wrongly."""
