"""What this machine has and lacks for building, running and verifying images, and the remedy for each.

`look.gather` looks (files, programs, real attempts: a sandbox, engines, what the network should reach),
`judge.decide` says what that means: tests feed it facts of machines that are not at hand. What the configured
engine and runner do not need keeps nobody from building.
"""
