"""From a job file or command line to a submitted job with its working directory."""
