"""Settings of this machine and site."""
