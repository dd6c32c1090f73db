"""Pools: where GPUs are that a batch system gives out, and how images are verified there."""
