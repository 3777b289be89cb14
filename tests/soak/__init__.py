"""Deterministic simulation of the head node: the real daemon over simulated hosts, links, clocks and disks."""
