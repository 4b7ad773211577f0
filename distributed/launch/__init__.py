"""Launch on several nodes: check the nodes, choose the master address, supervise one command on each node."""
