"""Verdicts, approvals, catalogs and keys: signed statements about images, and whether they count."""

from __future__ import annotations
