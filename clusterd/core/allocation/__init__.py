"""Allocation: the devices of each job, migrations of running jobs, and preemption."""
