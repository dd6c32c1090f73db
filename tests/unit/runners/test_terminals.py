"""Which terminals a sandbox has its own in the place of."""

from __future__ import annotations

import os
import pty
import select

import pytest

from imagefactory.runners.sandbox.terminals import Relay, group_terminals

HERE, THERE, TTY = 34816, 34817, 1280


@pytest.mark.parametrize(
    ("devices", "interactive", "groups"),
    [
        ({}, False, []),
        ({0: HERE, 2: HERE}, False, [(0, 2)]),
        ({1: HERE, 2: THERE}, False, [(1,), (2,)]),
        ({0: HERE, 1: HERE, 2: HERE}, True, [(0, 1, 2)]),
        ({0: HERE, 1: HERE}, True, [(0, 1)]),
        ({0: TTY, 1: HERE, 2: HERE}, True, [(0, 1, 2)]),  # `< /dev/tty`: the same by another name
        ({0: TTY, 1: HERE, 2: HERE}, False, [(0,), (1, 2)]),
        ({0: HERE, 1: HERE, 2: THERE}, True, [(0, 1), (2,)]),
    ],
)
def test_groups(devices: dict[int, int], interactive: bool, groups: list[tuple[int, ...]]) -> None:
    assert group_terminals(devices, interactive=interactive) == groups


def test_what_was_typed_before_the_relay_goes_in() -> None:
    """A prompt may be shown a moment before the caller's terminal is raw."""
    pid, typing = pty.fork()
    if pid == 0:  # its terminal is the caller's; it says by its exit code whether the line went in
        try:
            select.select([0], [], [], 60)
            master, follower = os.openpty()
            with Relay(master, (0, 1), interactive=True) as relay:
                typed = bool(select.select([0], [], [], 0)[0])
                if typed:
                    relay.pass_on({0: select.POLLIN})
                os._exit(0 if typed and os.read(follower, 100) == b"typed early\n" else 1)
        finally:
            os._exit(2)
    try:
        os.write(typing, b"typed early\n")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(typing)
