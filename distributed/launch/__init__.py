"""What starts a command on a node and watches over it."""
