"""How long one attack is: `tests/run attack` begins it again with another seed until its minutes are over."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.services.sandbox import ground, layers  # noqa: F401

settings.register_profile(
    "attack",
    max_examples=150,
    deadline=None,  # a machine may be busy
    database=None,  # the seed says it all
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("attack")
