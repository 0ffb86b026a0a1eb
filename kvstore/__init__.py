"""The block store: keys, protocol, client (the contract) and the daemon that keeps blocks on SSD."""
