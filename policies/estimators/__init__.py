"""What is learned of an engine and of its works: small objects with one owner, fed by events, without a clock."""
