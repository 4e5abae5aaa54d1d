"""Tables of fields in documents, and what a schema has in their place: a setting that is not documented is a red build."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter


def documented(page: str, title: str) -> dict[str, str]:
    """Field -> default as the table of a page's section says it."""
    sections = re.split(r"^## ", page, flags=re.MULTILINE)
    (text,) = [part for part in sections if part.startswith(title + "\n")]
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \| [^|]*\|$", text, flags=re.MULTILINE)
    return {field: default.strip("` ") for field, default in rows}


def declared(model: type) -> dict[str, str]:
    """Field -> default as the schema has it."""
    shape: dict[str, Any] = TypeAdapter(model).json_schema()
    return dict(_defaults(shape))


def _defaults(shape: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, one in shape["properties"].items():
        if name in shape.get("required", ()):
            yield name, "required"
        elif "$ref" in one or "allOf" in one:
            yield name, "below"
        else:
            yield name, json.dumps(one.get("default", [] if one.get("type") == "array" else {}))
