"""The program that builds a sandbox from the inside, started as `python -I -S .../runtime/sandbox`.

It uses only the standard library and nothing of imagefactory: init.py becomes process 1 of a sandbox. Its
files use relative imports, because imagefactory reads some of them too, such as the known processors.

It has two processes. The *keeper* (keeper.py) stays outside: it locks the layers, passes signals on, watches
the caller and the clock, relays the terminal and deletes the scratch directory. The *init* (init.py) is
process 1 inside: it builds the file system (root.py), drops every privilege, starts the command and reaps.
If the run has a cgroup, a third process, the *sweeper* (cgroups.py), removes the cgroup after the keeper. It
is in none of the namespaces, from which it could not. If the caller dies, the keeper ends the init. If the
keeper dies, the kernel ends the init. With the init dies every process of its pid namespace, even after
forks.

All mounts from the host are cloned as detached trees first and attached after the old root is gone. From
then on every path is the image's: no function here imports a module, no descriptor of the keeper is open,
limits are set, and targets (root.py) are walked name by name, before links can lead to /proc, /dev and /sys.
It needs Linux 5.12 (mount_setattr; overlay in user namespaces since 5.11, openat2 since 5.6).
"""
