"""Training state as named tensor shards and scalars."""
