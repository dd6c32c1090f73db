"""For all of these tests: what a developer or his site has set on this machine is none of their business."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from imagefactory.settings import files
from imagefactory.settings.load import ENVIRONMENT_PREFIX

SITE_FOLDERS = files.SITE_FOLDERS
"""Where a site's settings are on a machine where no test runs."""


@pytest.fixture(scope="session", autouse=True)
def no_settings_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Not its settings, trust and keys, in files and variables, nor its umask: a test makes its own."""
    empty = str(tmp_path_factory.mktemp("no-settings"))
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith((ENVIRONMENT_PREFIX, "XDG_"))]:
            patch.delenv(name)
        patch.setenv("HOME", empty)
        patch.setenv("XDG_CONFIG_DIRS", empty)
        patch.setattr(files, "SITE_FOLDERS", empty)  # of tests that name an environment
        umask = os.umask(0o022)
        yield
        os.umask(umask)
