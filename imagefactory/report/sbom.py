"""What a bill of materials holds, in a line. Pure."""

from __future__ import annotations

from imagefactory.lock.bill.model import Bill


def format_bill(bill: Bill, path: str) -> str:
    count = len(bill.components)
    unknown = sum(not one.licences for one in bill.components)
    return f"wrote {path}: {count} packages, the licence of {unknown} not known"
