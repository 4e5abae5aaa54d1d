"""The policies that ship with Headrace: YAML files beside this one, read like any operator's file.

They are examples and starting points, written out with the reason of each value; a gateway without a policy file runs
`balanced`.
"""

from __future__ import annotations

from importlib.resources import files

from policies.document import parse
from policies.schema import Policy

DEFAULT = "balanced"
PRESETS = ("balanced", "interactive", "throughput")


def text(name: str) -> str:
    """A preset's YAML text, comments included. Raises KeyError for a name that is not in PRESETS."""
    if name not in PRESETS:
        raise KeyError(f"preset {name!r}: must be one of {', '.join(PRESETS)}")
    return files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def load(name: str = DEFAULT) -> Policy:
    """A preset as a policy."""
    return parse(text(name), f"preset:{name}")
