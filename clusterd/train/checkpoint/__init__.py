"""Checkpoints in torch's distributed format, and export of the trained model."""
