"""Facts of this machine: what it has, what runs on it, and what another node says when it is asked."""
