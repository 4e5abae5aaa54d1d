"""Several processes on one listener: a supervisor, the workers that serve, and the decider that they obey."""
