"""Sizing policy `token_ledger`: KV tokens held and still to come, against what the engine has.

By idea: `account` (what an engine holds and will), `guards` (value against threshold), `reserve` (memory kept free for who is to
come), `load` (how busy urgent works keep an engine), `window` (grow, hold, shrink), `black_box` (an engine that tells nothing),
`found_seats` (one that does not tell its seats), `energy` (what tokens cost) and `policy`, which puts them together behind the
contract.
"""

from policies.limits.token_ledger.policy import TokenLedger

__all__ = ["TokenLedger"]
