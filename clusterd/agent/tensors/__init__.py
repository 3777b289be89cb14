"""The tensor store in shared memory and the transfer of slices between hosts."""
