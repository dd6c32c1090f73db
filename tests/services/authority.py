"""A certificate authority of the tests' own, by openssl, and the servers that it signs for."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

NEW = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A server's, good for `name` and 127.0.0.1; `authority` is the CA that a client must believe in."""

    name: str
    path: Path
    key: Path
    authority: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / "ca.pem"

    def sign(self, name: str) -> Certificate:
        """A new certificate for the host `name`."""
        openssl(self.folder, "req", *NEW, "-subj", f"/CN={name}", "-keyout", f"{name}.key",
                "-out", f"{name}.csr")  # fmt: skip
        names = {"IP:127.0.0.1", *([f"DNS:{name}"] if name[-1].isalpha() else [])}
        (self.folder / f"{name}.ext").write_text(
            f"subjectAltName={','.join(sorted(names))}\nbasicConstraints=CA:FALSE\n"
        )
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        openssl(self.folder, "x509", "-req", "-in", f"{name}.csr", *signing, "-extfile", f"{name}.ext",
                "-out", f"{name}.pem")  # fmt: skip
        return Certificate(
            name=name,
            path=self.folder / f"{name}.pem",
            key=self.folder / f"{name}.key",
            authority=self.path,
        )


def make_authority(folder: Path, name: str = "tests") -> Authority:
    """A CA whose files lie in `folder`. Two that a client meets must have two names."""
    folder.mkdir(parents=True, exist_ok=True)
    openssl(folder, "req", "-x509", *NEW, "-subj", f"/CN={name}", "-keyout", "ca.key", "-out", "ca.pem",
            "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip
    return Authority(folder=folder)


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
