"""Which devices and CPU cores a grant becomes."""
