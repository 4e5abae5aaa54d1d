"""`headrace demo`: the whole product on one machine, with simulated engines and the traffic of a real trace."""
