"""How one kind of engine is spoken to. Imports nothing of `gateway` or `policies`."""
