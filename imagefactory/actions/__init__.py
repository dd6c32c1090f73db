"""What each command does, in order: all that takes a Factory."""
