"""The dispatcher of a job list: one event loop, in which every change of state is a record."""
