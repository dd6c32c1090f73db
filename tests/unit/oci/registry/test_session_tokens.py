"""Where a password goes for a token, and what is said before."""

from __future__ import annotations

import pytest

from imagefactory.http import RejectedError
from imagefactory.oci.credentials import Credential, anonymous
from imagefactory.oci.registry.session import RegistryOptions, RegistryRequest, TokenStore

KNOWN = Credential(user="ann", secret="s3cret", origin="config.json")


class Talk:
    """What was said and asked, in the order in which it happened."""

    def __init__(self, host: str, credential: Credential | None, *plain: str) -> None:
        self.lines: list[str] = []
        options = RegistryOptions(
            credentials=(lambda _: credential) if credential else anonymous,
            plain_hosts=plain,
            tell=lambda text: self.lines.append(f"said: {text}"),
        )
        self.tokens = TokenStore(host, options, plain=bool(plain), fetch=self.fetch)

    def fetch(self, ask: RegistryRequest, signed: str) -> bytes:
        self.lines.append(f"asked: {ask.url.partition('?')[0]} {'with' if signed or ask.body else 'without'}")
        return b'{"token": "t"}'

    def renew(self, realm: str, scope: str = "repository:a:pull") -> None:
        header = f'Bearer realm="{realm}",service="x"'
        self.tokens.renew((scope,), header, "")


@pytest.mark.parametrize(
    "credential", [KNOWN, Credential(user="", secret="identity", origin="config.json")], ids=str
)
def test_a_credential_for_another_host_is_told_before_it_goes_and_once(credential: Credential) -> None:
    talk = Talk("registry.example.org:5000", credential)
    talk.renew("https://tokens.example.net/t")
    talk.renew("https://tokens.example.net/t", "repository:b:pull")
    assert talk.lines == [
        "said: registry.example.org:5000 has its tokens issued by tokens.example.net: "
        "the credentials from config.json are sent there",
        "asked: https://tokens.example.net/t with",
        "asked: https://tokens.example.net/t with",
    ]


@pytest.mark.parametrize(
    ("host", "realm"),
    [
        ("Registry.example.org:5000", "https://registry.example.org/token"),
        ("[::1]:5000", "https://[::1]:5001/token"),
        ("docker.io", "https://auth.docker.io/token"),
        ("registry.gitlab.com", "https://gitlab.com/jwt/auth"),
    ],
)
def test_its_own_host_and_known_pairs_need_no_word(host: str, realm: str) -> None:
    talk = Talk(host, KNOWN)
    talk.renew(realm)
    assert talk.lines == [f"asked: {realm} with"]


def test_without_a_credential_nothing_is_given_away() -> None:
    talk = Talk("registry.example.org", None)
    talk.renew("https://tokens.example.net/t")
    assert talk.lines == ["asked: https://tokens.example.net/t without"]


@pytest.mark.parametrize(
    "realm", ["https://auth.docker.io.example.net/token", "https://evil.example/auth.docker.io"]
)
def test_a_name_that_looks_like_a_known_one_is_told(realm: str) -> None:
    talk = Talk("docker.io", KNOWN)
    talk.renew(realm)
    assert talk.lines[0].startswith("said: docker.io has its tokens issued by ")


@pytest.mark.parametrize(
    ("realm", "goes"),
    [
        ("http://registry.example.org:5000/token", True),
        ("http://tokens.example.org/token", True),
        ("http://127.0.0.1:5001/token", True),
        ("https://other.example.net/token", True),
        ("http://other.example.net/token", False),
        ("http://registry.example.org:5001/token", False),
        ("http://registry.example.org:5000@other.example.net/token", False),
    ],
)
def test_without_encryption_a_password_goes_only_where_the_user_said(realm: str, goes: bool) -> None:
    talk = Talk("registry.example.org:5000", KNOWN, "registry.example.org:5000", "tokens.example.org")
    if goes:
        talk.renew(realm)
        assert talk.lines[-1].endswith(" with")
        return
    with pytest.raises(RejectedError):
        talk.renew(realm)
    assert talk.lines == []
