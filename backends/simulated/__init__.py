"""A virtual inference engine: a pure model in virtual time, and an HTTP face that speaks like the real ones."""
