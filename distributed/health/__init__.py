"""What the facts of machines mean for training, and the fix."""
