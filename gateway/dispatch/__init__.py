"""From a waiting work to bytes at its client: who may start where, one try on one engine, the relay, the end."""
