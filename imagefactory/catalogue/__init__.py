"""The signed catalogue: what a registry offers, for people who have no factory."""
