"""What images stand on: bases from Debian's packages, and bases pulled from registries."""
