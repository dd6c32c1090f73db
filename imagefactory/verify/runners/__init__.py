"""What starts images. One runner, one file, one row here."""

from __future__ import annotations

RUNNERS = ("unshare", "docker", "apptainer")
"""The runners that `--runner` takes."""

OWN_RUNNER = {"assemble": "unshare", "docker": "docker", "apptainer": "apptainer"}
"""Which runner tries what an engine made, where neither `--runner` nor the setting says otherwise."""
