"""Forecasts of a job's speed, remaining work and earliest start."""
