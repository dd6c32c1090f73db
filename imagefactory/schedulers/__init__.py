"""Pools: where GPUs are that a batch system gives out. One pool: a folder, a row in settings/choices.py."""

from __future__ import annotations
