"""Judge whether machines are fit for training, and how to fix those that are not."""
