"""A registry as a Store: a client of the OCI distribution specification that retries faults."""
