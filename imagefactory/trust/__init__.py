"""What is said of images, by whom, and what it is worth."""

from __future__ import annotations
