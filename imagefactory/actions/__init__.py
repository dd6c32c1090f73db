"""What each command does, in order: all that takes a Factory."""

from __future__ import annotations
