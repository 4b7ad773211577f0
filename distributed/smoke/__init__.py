"""The smoke test: check collectives, measure their bandwidth, and find slow ranks and links."""
