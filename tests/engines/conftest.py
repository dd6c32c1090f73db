"""Real engines and registries, each started once for the session where a test asks for it."""

from __future__ import annotations

from tests.services.channels import real_channels  # noqa: F401
from tests.services.fixtures import (  # noqa: F401
    apptainer,
    dockerd,
    nothing_big_stays,
    podman,
    podman_session,
    registry,
    services_environment,
    services_folder,
)
