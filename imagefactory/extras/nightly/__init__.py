"""What is outdated, and the nightly run that rebuilds and verifies."""
