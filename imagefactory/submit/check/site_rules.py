"""What a site's own pages ask of a submit file, and what a facilitator there would say. Pure.

How much it weighs is the site's: what one refuses is only unwise at another. `pools/sites.toml` has the
sources.
"""

from __future__ import annotations

from collections.abc import Iterator

from imagefactory.schedulers.sites import RETIRED, Site, SiteCommand
from imagefactory.submit.check.findings import Edit, SubmitFinding, advice, wrong
from imagefactory.submit.check.language import Jobs, SubmitSetting

_TRUE = ("true", "t", "yes", "1")


def site_findings(jobs: Jobs, site: Site) -> Iterator[SubmitFinding]:
    """All that this site has to say of one `queue`."""
    if jobs.asks_gpus:
        for command in site.commands:
            yield from _commanded(jobs, site, command)
        yield from _length(jobs, site)
    yield from _needed(jobs, site)
    yield from _environment(jobs, site)
    yield from _retired(jobs)


def _commanded(jobs: Jobs, site: Site, command: SiteCommand) -> Iterator[SubmitFinding]:
    key, _, value = (part.strip() for part in command.line.partition("="))
    mine = f"my.{key.removeprefix('+').lower()}"
    if jobs.value(mine).lower() == value.lower():
        return
    setting = jobs.settings.get(mine)
    what = f"is {jobs.value(mine)[:40]}" if setting else "is missing"
    where = setting.line if setting else jobs.line
    if command.agreed:
        text = f"{key} {what}: without it, the shared GPUs of {site.title} never match"
        yield wrong(where, "site", text, f"write {command.line}")
    else:
        text = f"{key} {what}, and it may be required: {command.why}"
        yield advice(where, "site", text, f"write {command.line}, which does no harm")


def _length(jobs: Jobs, site: Site) -> Iterator[SubmitFinding]:
    lengths = [one.line for one in site.lengths]
    if not lengths:
        return
    key = lengths[0].partition("=")[0].strip()
    mine = f"my.{key.removeprefix('+').lower()}"
    values = [line.partition("=")[2].strip() for line in lengths]
    if mine not in jobs.settings:
        text = f"{key} is missing: {site.title} assumes its usual length for this job"
        yield advice(jobs.line, "site", text, f"write one of {', '.join(lengths)}")
    elif not jobs.unknown(mine) and jobs.value(mine).lower() not in (value.lower() for value in values):
        text = f"{key} is {jobs.value(mine)[:40]}, which is not a job length of {site.title}"
        yield wrong(jobs.settings[mine].line, "site", text, f"write one of {', '.join(lengths)}")


def _needed(jobs: Jobs, site: Site) -> Iterator[SubmitFinding]:
    for need in site.needs:
        if need.key in jobs.settings or f"my.{need.key.replace('_', '')}" in jobs.settings:
            continue
        tell = wrong if need.refused else advice
        yield tell(jobs.line, "missing", f"{need.key} is missing: {need.why}", f"write {need.write}")


def _environment(jobs: Jobs, site: Site) -> Iterator[SubmitFinding]:
    if jobs.value("getenv").lower() not in _TRUE:
        return
    setting = jobs.settings["getenv"]
    hint = "list only the variables that the job needs: getenv = ONE, OTHER"
    if site.getenv:
        yield wrong(setting.line, "getenv", f"getenv = true: {site.getenv}", hint)
    else:
        text = "getenv = true copies all variables of your shell, with paths of this machine; some pools"
        yield advice(setting.line, "getenv", f"{text} reject it", hint)


def _retired(jobs: Jobs) -> Iterator[SubmitFinding]:
    for setting in jobs.settings.values():
        for old in RETIRED:
            if old.start not in setting.value:
                continue
            edits = _renamed(setting, old.start, old.instead) if old.same else ()
            tell = wrong if old.gone else advice
            text = f"'{old.start}': {old.why}"
            yield tell(setting.line, "retired", text, f"write {old.instead}", edits=edits)


def _renamed(setting: SubmitSetting, old: str, new: str) -> tuple[Edit, ...]:
    if setting.end != setting.line:
        return ()
    line = f"{setting.written} = {setting.value.replace(old, new)}"
    return (Edit(first=setting.line, last=setting.end, text=(line,)),)
