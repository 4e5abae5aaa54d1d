"""`headrace key new TENANT`: make an API key, print it once, and the entry to add to the keys file.

The key is nowhere kept: the file holds only its digest, so a key that is lost is made anew. A class that the policy does not
have is refused with `--policy`, and warned of without it, where the policy in force is not known.
"""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from pathlib import Path

from gateway.control.policy_store import read_policy
from gateway.ingress.auth import digest
from gateway.settings_file import SettingsError
from policies import presets

KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9._:@/-]{1,64}")
_BAD_NAME = "{what} {given!r}: expected 1 to 64 of A-Z a-z 0-9 . _ : @ / -; choose another name"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser("key", help="make API keys")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="print a new key and its entry for the keys file")
    new.add_argument("tenant", metavar="TENANT", help="who the key is for")
    new.add_argument("--max-class", default="", metavar="CLASS", help="highest class the key may use (default: any)")
    new.add_argument("--policy", type=Path, metavar="FILE", help="policy document whose classes there are")
    new.add_argument("--id", default="", metavar="ID", help="name for metrics and logs (default: from the digest)")


def run(args: argparse.Namespace) -> int:
    """The key goes to standard error when standard output is a file, so that `>> keys.yaml` adds only the entry."""
    for what, given, optional in (
        ("tenant", args.tenant, False),
        ("class", args.max_class, True),
        ("id", args.id, True),
    ):
        if not (_NAME.fullmatch(given) or (optional and not given)):
            sys.stderr.write(_BAD_NAME.format(what=what, given=given) + "\n")
            return 2
    if args.max_class:
        policy = presets.load() if args.policy is None else read_policy(args.policy)
        if args.max_class not in policy.classes:
            expected = f"must be one of {', '.join(policy.classes)}"
            if args.policy is not None:
                raise SettingsError(f"key: --max-class {args.max_class}: {expected}; or add it to {args.policy}")
            sys.stderr.write(
                f"headrace key: --max-class {args.max_class} is no class of the preset {presets.DEFAULT}, and a policy without"
                " it gives the key its least urgent class; name yours with --policy FILE\n"
            )
    secret = "sk-" + secrets.token_urlsafe(KEY_BYTES)
    told = sys.stdout if sys.stdout.isatty() else sys.stderr
    told.write(f"key (shown this once; only its digest is kept): {secret}\nadd to the keys file:\n")
    told.flush()
    sys.stdout.write(entry(args.tenant, secret, max_class=args.max_class, key_id=args.id))
    return 0


def entry(tenant: str, secret: str, *, max_class: str = "", key_id: str = "") -> str:
    """The YAML list entry for a key."""
    lines = [f'- tenant: "{tenant}"', f'  sha256: "{digest(secret)}"']
    if max_class:
        lines.append(f'  max_class: "{max_class}"')
    if key_id:
        lines.append(f'  id: "{key_id}"')
    return "\n".join(lines) + "\n"
