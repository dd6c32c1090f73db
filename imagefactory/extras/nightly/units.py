"""systemd's units that start a night each day, as a user's own. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from imagefactory.errors import UsageError
from imagefactory.settings.load import ENVIRONMENT_PREFIX, NONCE_STORE_KEY

NAME = "imagefactory-night"
AT = "*-*-* 02:17"
PREFIXES = (ENVIRONMENT_PREFIX, "SBATCH_")
POOL_VARIABLES = ("PATH", "SLURM_CONF", "CONDOR_CONFIG")
_SERVICE = """\
# Written by `imagefactory night --install`.
[Unit]
Description=imagefactory: build, verify and publish what is due in {root}

[Service]
Type=oneshot
WorkingDirectory={root}
{environment}ExecStart={command}
"""
_TIMER = f"""\
# Written by `imagefactory night --install`. A night that the machine slept through is made up for.
[Unit]
Description=imagefactory: every night

[Timer]
OnCalendar={AT}
Persistent=true

[Install]
WantedBy=timers.target
"""


def format_units(root: str, command: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The files by their names. The service gets this shell's PATH and settings, also those of the pool's own
    commands, but no secret.

    Raises UsageError for a folder that a line of such a file cannot name.
    """
    if not root.isprintable() or root != root.strip() or root.endswith("\\"):
        raise UsageError(
            "project-path-invalid",
            f"systemd units cannot name the directory {root!r}",
            hint="rename it: no control characters, no space at either end, no backslash at the end",
        )
    kept = {
        name: text
        for name, text in sorted(environ.items())
        if name in POOL_VARIABLES or (name.startswith(PREFIXES) and name != NONCE_STORE_KEY)
    }
    lines = "".join(f"Environment={_quoted(f'{name}={text}')}\n" for name, text in kept.items())
    # A `$` begins a variable on ExecStart= alone.
    words = " ".join(_quoted(word).replace("$", "$$") for word in command)
    folder = root.replace("%", "%%")
    service = _SERVICE.format(root=folder, environment=lines, command=words)
    return {f"{NAME}.service": service, f"{NAME}.timer": _TIMER}


def _quoted(word: str) -> str:
    """A word as systemd.syntax(7) and systemd.service(5) read it; `%` begins a specifier there.

    What is not printable, of which several characters end a line, is written by its bytes.
    """
    plain = "".join(_ESCAPED.get(one) or (one if one.isprintable() else _bytes_of(one)) for one in word)
    return f'"{plain}"' if plain != word or not word or set(word) & set(" '*?;") else plain


_ESCAPED = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "%": "%%"}


def _bytes_of(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


def enabling() -> tuple[str, str]:
    """What a person types: the timer now and at each start; and nights while he is logged out."""
    return f"systemctl --user enable --now {NAME}.timer", "loginctl enable-linger"
