"""From client bytes to an `Exchange` and back: the public HTTP listener, and nothing that decides about work."""
