"""Check whether machines are fit for training, and print how to fix those that are not."""
