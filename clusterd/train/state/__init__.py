"""Training state as named tensor shards and plain values."""
