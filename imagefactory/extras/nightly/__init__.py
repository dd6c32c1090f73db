"""Find outdated recipes and locks, and run the nightly build and verification."""
