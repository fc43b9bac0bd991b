"""Where the clients of a simulation compute: in this process, or in several at once."""
