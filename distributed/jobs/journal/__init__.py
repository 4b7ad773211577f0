"""What was recorded of a job list: its journal, and the state that follows from the records."""
