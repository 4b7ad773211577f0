"""Runs: how one is while it goes on, and what it leaves behind: its directory, why it ended, its report."""
