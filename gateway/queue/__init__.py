"""Order and state of waiting work in Redis: an index that its owners can rebuild."""
