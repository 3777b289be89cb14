"""Training scripts as users write them, run under several plans and compared with one process."""
