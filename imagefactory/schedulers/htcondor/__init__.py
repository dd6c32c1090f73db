"""HTCondor as a pool: its commands, ads, DAGs and logs."""
