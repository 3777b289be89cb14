"""Admission of jobs and the order in which queued jobs are considered."""
