"""How many devices each job gets, which running jobs move, and who is preempted for whom."""
