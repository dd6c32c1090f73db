"""What an upload asks of a registry that tests of whole pushes do not see."""

from __future__ import annotations

import pytest
import requests

from imagefactory.oci.manifests import digest_of
from imagefactory.oci.model import Descriptor
from imagefactory.oci.registry.client import Registry
from imagefactory.oci.registry.exchange import Patience, RegistryOptions
from tests.made.registry import registry_made_here


@pytest.mark.parametrize("piece", [0, 3])
def test_a_registry_may_take_long_where_it_hashes_a_blob(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that end or carry an upload wait longer than those that ask for a word."""
    waits: set[tuple[str, float]] = set()
    request = requests.Session.request

    def noting(self: requests.Session, method: str, url: str, **more: object) -> requests.Response:
        waits.add((method, more["timeout"][1]))  # type: ignore[index]
        return request(self, method, url, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(requests.Session, "request", noting)
    data = b"a blob"
    blob = Descriptor(media_type="application/octet-stream", digest=digest_of(data), size=len(data))
    with registry_made_here() as server:
        options = RegistryOptions(patience=Patience(read=7.0, commit=77.0), piece=piece)
        Registry(server.host, options).write("a/b", blob, lambda start: iter([data[start:]]))
    assert waits - {("HEAD", 7.0), ("PATCH", 77.0)} == {("POST", 7.0), ("PUT", 77.0)}
    assert (("PATCH", 77.0) in waits) == bool(piece)
