"""Probability that a job runs as long as it says, from what is known at its submission and after its first steps."""
