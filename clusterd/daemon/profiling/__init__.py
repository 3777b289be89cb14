"""Trial selection and the performance models learned from measurements."""
