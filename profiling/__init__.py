"""What a job's step costs under every plan on every allocation: measurements, model, fit, trials, curves, progress."""
