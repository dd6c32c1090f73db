"""Which terminals a sandbox has its own in the place of."""

from __future__ import annotations

import pytest

from imagefactory.runners.sandbox.terminals import group_terminals

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
