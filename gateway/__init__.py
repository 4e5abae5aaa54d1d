"""The mechanism: carries requests, queues them, applies the decisions of `policies` to the engines of `backends`."""
