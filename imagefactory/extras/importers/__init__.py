"""Convert files of other tools (environments, Dockerfiles, locks) into recipes."""
