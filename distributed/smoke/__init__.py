"""The smoke test: collectives give correct results, their bandwidth, and slow ranks and links."""
