"""Sample loading and named data sets."""
