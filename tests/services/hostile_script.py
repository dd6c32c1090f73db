"""A script of a Debian package that wants out of the build, and the host's things that it is after."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.services.children import child

# In Perl, which is essential in Debian. Each line that it writes is an attempt and what came of it.
SCRIPT = r"""#!/usr/bin/perl
use strict; use warnings; use Socket;
my ($report, $home, $port, $abstract, $victim) = (@CONFIGURATION@);
open(my $out, '>', $report) or die "$report: $!";
sub attempt {
    my ($name, $code) = @_;
    my $got = eval { $code->() } ? 1 : 0;
    print $out "$name=$got\n";
}
sub writes { my ($path) = @_; return open(my $file, '+<', $path) ? 1 : 0; }
sub run { open(STDERR, '>', '/dev/null'); return system(@_) == 0; }

attempt('itself', sub { writes($report) });
attempt('uid-0', sub { $> == 0 });
attempt('mknod', sub { run('mknod', '/dev/shm/disk', 'b', '254', '0'); open(my $f, '<', '/dev/shm/disk') });
attempt('tcp', sub {
    socket(my $s, PF_INET, SOCK_STREAM, 0) or return 0;
    connect($s, sockaddr_in($port, inet_aton('127.0.0.1')));
});
attempt('abstract', sub {
    socket(my $s, PF_UNIX, SOCK_STREAM, 0) or return 0;
    connect($s, pack('S a*', AF_UNIX, "\0$abstract"));
});
attempt('core-pattern', sub { writes('/proc/sys/kernel/core_pattern') });
attempt('sysrq', sub { writes('/proc/sysrq-trigger') });
attempt('kernel-memory', sub { open(my $m, '<', '/proc/kcore') });
attempt('victim', sub {
    grep { open(my $f, '<', "$_/cmdline"); index(<$f> // '', $victim) >= 0 } glob('/proc/[0-9]*');
});
attempt('sysfs', sub { mkdir('/sysfs'); run('mount', '-t', 'sysfs', 'sysfs', '/sysfs') });

# Out of the chroot of mmdebstrap, if this is one.
mkdir('/escape'); chroot('/escape');
for (1 .. 64) { chdir('..') }
chroot('.');
attempt('home', sub { -e $home });
attempt('secret', sub { open(my $f, '<', "$home/.ssh/id") });
attempt('shadow', sub { open(my $f, '<', '/etc/shadow') });
attempt('cache', sub { open(my $f, '>', "$home/cache/mine") });
attempt('store', sub { open(my $f, '>', "$home/store/mine") });
attempt('disks', sub { grep { -b } glob('/dev/* /dev/*/*') });
attempt('sockets', sub { grep { -S } glob('/run/* /run/*/* /tmp/* /var/run/* /dev/*') });
attempt('init-root', sub { -e "/proc/1/root$home" });
for my $path ('/usr', '/bin', '/input', '/etc/alternatives', '/dev/null') {
    run('mount', '-o', 'remount,bind,rw,dev,suid', $path);
}
attempt('usr', sub { open(my $f, '>', '/usr/bin/imagefactory-was-here') });
attempt('input', sub { grep { writes($_) } glob('/input/*') });
attempt('alternatives', sub { open(my $f, '>', '/etc/alternatives/imagefactory-was-here') });
attempt('input-unlink', sub { grep { unlink } glob('/input/*.deb') });
close($out);
"""
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
ALLOWED = ("itself", "uid-0")
"""The attempts that succeed in a build too. All others have to fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the script is after: a home with a key, a cache and a store, two listeners, and a process."""

    home: Path
    tcp: socket.socket
    abstract: socket.socket
    victim: subprocess.Popen[bytes]

    def script(self, report: str) -> str:
        """Its text. It writes its lines to `report`."""
        name = self.abstract.getsockname().decode().removeprefix("\0")
        values = (report, str(self.home), str(self.tcp.getsockname()[1]), name, str(self.home / "victim"))
        return SCRIPT.replace("@CONFIGURATION@", ", ".join(f"'{value}'" for value in values))

    def check(self) -> None:
        """Nothing of the host was touched."""
        assert self.victim.poll() is None
        assert [path.name for path in (self.home / "cache").iterdir()] == ["file"]
        assert [path.name for path in (self.home / "store").iterdir()] == ["file"]
        assert (self.home / ".ssh/id").read_text() == "secret"
        assert not Path("/usr/bin/imagefactory-was-here").exists()
        for listener in (self.tcp, self.abstract):
            listener.setblocking(False)
            try:
                listener.accept()
            except BlockingIOError:
                continue
            raise AssertionError(f"someone connected to {listener}")


@contextmanager
def make_host(folder: Path, name: str) -> Iterator[Host]:
    """In `folder`, which others may enter. Its directories are open to all: no mode stands in the way."""
    home = folder / f"home-{name}"
    home.mkdir()
    (home / "victim").touch()
    for path in (home / ".ssh/id", home / "cache/file", home / "store/file"):
        path.parent.mkdir(parents=True)
        path.write_text("secret")
        path.chmod(0o600)
    for path in (home, home / "cache", home / "store"):
        path.chmod(0o777)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
        child(["tail", "-f", "/dev/null", str(home / "victim")], **QUIET) as victim,
    ):
        abstract.bind(f"\0imagefactory-{name}")
        abstract.listen()
        yield Host(home=home, tcp=tcp, abstract=abstract, victim=victim)


def parse_report(text: str) -> dict[str, bool]:
    return {name: value == "1" for name, _, value in (line.partition("=") for line in text.splitlines())}
