"""Runs: their directories, their state while they run, why they ended, and their reports."""
