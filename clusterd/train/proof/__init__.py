"""Proofs by running: parts of a batch give what the whole gives, and a restored state goes on as the one before."""
