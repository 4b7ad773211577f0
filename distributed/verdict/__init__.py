"""Why a run ended: the failures that are recorded or logged, the first of them, and ranks that hang."""
