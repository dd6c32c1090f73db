"""Signed statements about images (verdicts, approvals, catalogs), the keys that sign them, and their
verification.
"""

from __future__ import annotations
