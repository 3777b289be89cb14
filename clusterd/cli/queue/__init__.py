"""Commands that change the queue: edits of jobs, claims on devices, results of many jobs."""
