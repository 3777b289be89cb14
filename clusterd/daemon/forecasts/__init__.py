"""Forecasts of starts and ends: the process that makes them, and what came of them."""
