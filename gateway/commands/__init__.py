"""The commands of `headrace`, one module each: `add_parser(subparsers)` and `run(args) -> int`."""
