"""Whole state out of shards, and training state to disk and back."""
