"""Check this machine for building, running and verifying images, and suggest a fix for each problem.

`look.gather_machine_facts` collects facts (files, programs, real tests of a sandbox, engines, network
services), and `judge` rates them, so tests can use the facts of other machines. A build does not require
parts that the configured engine and runner do not use.
"""
