"""The Debian packages of a base: the archive of this machine, apt as the solver, the file of a lock."""
