"""HTCondor as a pool: its commands, its ads, its DAGs, its logs."""
