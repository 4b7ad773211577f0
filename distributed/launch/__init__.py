"""A launch: are the nodes fit, where do they meet, and one command on each that leaves nothing behind."""
