"""Pools: batch systems with GPUs. Each pool is a directory here and a row in settings/choices.py."""

from __future__ import annotations
