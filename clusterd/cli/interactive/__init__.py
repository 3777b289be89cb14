"""Commands that connect this terminal or machine to running jobs."""
