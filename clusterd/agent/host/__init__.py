"""Facts, files, processes, ports and GPUs of this host."""
