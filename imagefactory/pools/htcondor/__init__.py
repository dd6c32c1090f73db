"""HTCondor as a pool: its ads, its DAGs, its logs, its submit files."""
