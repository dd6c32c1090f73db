"""The process in which spython works; apptainer_command.py starts it. Standard library and spython alone.

spython runs a program called `singularity` from its process's PATH, with its process's environment, and
offers no way to stop what it started. So it gets a process whose PATH, environment and group are chosen
for one call. Of spython's ways this is the one that tells how a command ended: `build` without
`stream` drops the exit code, and `build` with it reads one of two pipes, so that a build which says much on
the other one never ends. Arguments: the verb, then what apptainer gets after it.

Standard input is a pipe that its parent holds: when it ends, the parent has died and so does all here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def end_with_the_parent() -> None:
    """Ends this process's group when standard input ends; what is started here gets an empty one."""
    parent = os.dup(0)
    with open(os.devnull) as empty:  # noqa: PTH123
        os.dup2(empty.fileno(), 0)

    def wait() -> None:
        os.read(parent, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def main(verb: str, *arguments: str) -> int:
    from spython.main import get_client
    from spython.utils import stream_command

    end_with_the_parent()
    client = get_client()
    client.quiet = False
    command = [*client._init_command(verb), *arguments]
    try:
        for line in stream_command(command, output_type="both"):
            sys.stdout.write(line)
            sys.stdout.flush()
    except BrokenPipeError:
        # The parent has died: this may be seen here before the thread sees it, which an exit would end.
        os.killpg(0, signal.SIGKILL)
    except subprocess.CalledProcessError as error:
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
