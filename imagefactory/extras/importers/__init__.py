"""Files that people have already (environments, Dockerfiles, locks) as recipes."""
