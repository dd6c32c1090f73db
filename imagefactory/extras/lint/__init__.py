"""What is wrong with a submit file for a pool: read, understood, matched with machines, and told."""

from __future__ import annotations
