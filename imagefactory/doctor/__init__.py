"""Checks of this machine for building, running and verifying images, and the remedy for each problem.

`look.gather_machine_facts` collects facts (files, programs, real attempts: a sandbox, engines, network
services), `judge` rates them, so tests can use facts of other machines. Missing parts that the configured
engine and runner do not need do not prevent a build.
"""
