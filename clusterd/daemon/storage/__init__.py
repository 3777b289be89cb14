"""Files that the head node keeps for jobs: workdirs, secrets, logs, results."""
