"""For every suite."""

from __future__ import annotations

import signal

# A shell starts what it puts into the background with SIGINT ignored, and programs inherit that: tests that
# interrupt a program would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
