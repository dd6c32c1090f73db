"""The steps of a night: this program's own commands, each in a process of its own, and what went wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from imagefactory.errors import EXIT_BUILD, EXIT_USAGE, FactoryError
from imagefactory.extras.nightly.changes import NightRow, one_line
from imagefactory.schedulers.pool import Pools
from imagefactory.progress import Progress
from imagefactory.verify.model import Evidence


class Command(Protocol):
    """Runs this program with `words`, tells the log, and gives its exit code and what it printed."""

    def __call__(self, words: Sequence[str]) -> tuple[int, str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NightBench:
    """What a night takes from this process."""

    clock: Callable[[], datetime]
    pause: Callable[[float], None]
    pools: Pools
    evidence: Evidence
    run: Command


@dataclass(kw_only=True)
class Steps:
    """Runs steps and remembers their `failures`, each once, and `notes`. `faults` are those of recipes."""

    bench: NightBench
    progress: Progress
    faults: tuple[str, ...]
    failures: list[NightRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def do(self, what: str, *words: str, expected: int = 0, of: str = "") -> tuple[int, Mapping[str, Any]]:
        """Runs a command of this program, and tells its errors but for those of the code that is `expected`
        (with `of`, of that name alone). Gives its exit code and its JSON."""
        with self.progress.stage(f"{words[0]} {what}" if what != words[0] else what):
            try:
                code, said = self.bench.run((*words, "--json"))
            except (FactoryError, OSError) as error:
                self.fail(what, error)
                return EXIT_BUILD, {}
        told = _document(said)
        errors = [row for row in told.get("errors", ()) if isinstance(row, dict)]
        for row in errors:
            name, own = str(row.get("target") or what), int(row.get("exit_code", 1))
            told_already = own == EXIT_USAGE and row.get("message") == "\n".join(self.faults)
            if not told_already and (own != expected or of not in ("", name)):
                why, hint = one_line(str(row.get("message", ""))), one_line(str(row.get("hint", "")))
                self.tell(NightRow(what=one_line(name), why=why, hint=hint, code=own))
        if code != 0 and not errors:
            why = f"`imagefactory {words[0]}` ended with exit code {code}"
            self.tell(NightRow(what=what, why=why, hint="see the log", code=max(code, 1)))
        return code, told

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """What goes wrong here is told, and ends nothing else."""
        try:
            yield
        except (FactoryError, OSError) as error:
            self.fail(what, error)

    def fail(self, what: str, error: FactoryError | OSError) -> None:
        if isinstance(error, FactoryError):
            why, hint, code = error.message, error.hint, error.exit_code
        else:
            why, hint, code = str(error), "check the disk and its permissions", EXIT_BUILD
        self.tell(NightRow(what=what, why=one_line(why), hint=one_line(hint), code=code))

    def tell(self, *rows: NightRow) -> None:
        """Each once: a sweep is collected several times."""
        self.failures += [row for row in rows if row not in self.failures]


def _document(said: str) -> Mapping[str, Any]:
    try:
        found = json.loads(said)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
