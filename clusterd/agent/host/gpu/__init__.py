"""GPUs of this host: what the driver and the kernel report about them."""
