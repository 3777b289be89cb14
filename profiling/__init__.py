"""Performance model of training steps: measurements, model, fit, trials, curves, progress."""
