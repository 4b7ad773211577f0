"""What a run leaves behind, and what it says: how it is, why it ended, its report."""
