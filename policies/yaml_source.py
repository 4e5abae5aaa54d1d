"""YAML text checked against a typed model, every mistake at once and each with its line.

A configuration file is edited by hand, often at a bad moment, so one run must name everything that is wrong with it:
file, line, key, the value found and the value expected. YAML is composed into nodes (which know their lines), turned
into plain values here, and validated by pydantic; pydantic's findings are then led back to the lines.

Stricter than YAML on purpose: a key written twice is refused (YAML readers silently keep one), merge keys and tags that
build objects are refused, a date is plain text, and an empty document is an error (a file caught while an editor
rewrites it must not pass as "all defaults").

Bounds: TEXT_MAX characters, NODES_MAX values after aliases are expanded, DEPTH_MAX levels. Values that are or
stand under a secret's name never get into a message. Knows nothing of policies: headrace.yaml and the keys file are read through it.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

TEXT_MAX = 1024 * 1024
NODES_MAX = 50_000
DEPTH_MAX = 32
SHOWN_MAX = 60

Path = tuple[str | int, ...]
Finding = tuple[Path, str, str]
"""(where, what is there, what is expected): what a `check` of `load` reports; `at` makes the words for a value."""

T = TypeVar("T")

_TAG = "tag:yaml.org,2002:"
_TEXT_TAGS = {_TAG + "str", _TAG + "timestamp"}
_PLAIN_TAGS = {_TAG + name for name in ("int", "float", "bool", "null")}
_SECRET_KEY = re.compile(
    r"(^|[_-])(key|apikey|token|secret|password|credentials?|authorization|url|sha256)$", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"://[^/\s]*@|\b(sk|hr)-|\bbearer\b", re.IGNORECASE)
_NUMBER_WITH_UNIT = re.compile(r"^\s*[-+]?[0-9.]+\s*[a-zA-Z%]+\s*$")


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a document.

    line         1-based; the line of the key, or of the mapping that lacks it
    key          dotted path, e.g. "classes.chat.ttft_sla_s"; "" when the document as a whole is meant
    value        what stands there, in words fit for "key is ..."; never a secret
    expectation  what should stand there, or what to do
    """

    file: str
    line: int
    key: str
    value: str
    expectation: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: "
        return f"{where}{self.key} is {self.value}; {self.expectation}" if self.key else where + self.expectation


class DocumentError(ValueError):
    """A document that is not taken, with every problem found in it, in line order. str() is one problem a line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: (problem.line, problem.key)))
        super().__init__("\n".join(map(str, self.problems)))


def load(text: str, model: type[T], file: str, *, check: Callable[[T], Iterable[Finding]] | None = None) -> T:
    """Read YAML text into `model` (a pydantic model or an annotated dataclass).

    file     the name shown in problems; nothing is opened
    check    what the types cannot say (references between keys); runs only when the types are right
    Raises DocumentError with all problems found.
    """
    source = _Source(file)
    data = source.read(text)
    adapter = _adapter(model)  # type: ignore[arg-type]  # mypy asks whether its instances can be hashed
    try:
        value: T = adapter.validate_python(data)
    except ValidationError as error:
        schema = adapter.json_schema(mode="validation")
        for detail in error.errors(include_url=False):
            source.report(*_finding(detail["loc"], detail, schema))
        raise DocumentError(source.problems) from None
    for finding in () if check is None else check(value):
        source.report(*finding)
    if source.problems:
        raise DocumentError(source.problems)
    return value


@cache
def _adapter(model: type) -> TypeAdapter[Any]:
    """Made once for each model: that takes longer than reading a document."""
    return TypeAdapter(model)


def shown(path: Path, value: object) -> str:
    """A value in the words of a problem: short, on one line, and hidden when it or its key sounds secret."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    key = next((part for part in reversed(path) if isinstance(part, str)), "")
    if value is not None and (_SECRET_KEY.search(key) or _SECRET_VALUE.search(str(value))):
        return "(hidden)"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else f"'{_one_line(value)}'"
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 4] + "...'"


@dataclass(slots=True)
class _Source:
    """One document: its values by path, the line of each, and what was found wrong."""

    file: str
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _nodes: int = 0

    def read(self, text: str) -> object:
        """Plain values of the one document in `text`. Raises DocumentError when there is no reading on."""
        if len(text) > TEXT_MAX:
            self._refuse(1, f"the document has {len(text)} characters; must be at most {TEXT_MAX}")
        try:
            node = _yaml().compose(text.removeprefix("\ufeff"))
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self._refuse(1 if mark is None else mark.line + 1, f"not YAML: {_one_line(_first(error))}")
        except RecursionError:
            self._refuse(1, f"nested too deeply; at most {DEPTH_MAX} levels")
        except (YAMLError, ValueError) as error:
            self._refuse(1, f"not YAML: {_one_line(str(error))[:200]}")
        if node is None:
            self._refuse(1, "the document is empty; write at least the required keys")
        return self._value(node, ())

    def report(self, path: Path, value: str, expectation: str) -> None:
        self.problems.append(Problem(self.file, self._line(path), dotted(path), value, expectation))

    def _refuse(self, line: int, expectation: str) -> NoReturn:
        raise DocumentError([*self.problems, Problem(self.file, line, "", "", expectation)])

    def _line(self, path: Path) -> int:
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def _value(self, node: Node, path: Path) -> object:
        self.lines.setdefault(path, node.start_mark.line + 1)
        self._nodes += 1
        if self._nodes > NODES_MAX:
            self._refuse(self.lines[path], f"more than {NODES_MAX} values with aliases expanded; make it smaller")
        if len(path) > DEPTH_MAX:
            self._refuse(self.lines[path], f"nested too deeply; at most {DEPTH_MAX} levels")
        if isinstance(node, MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, ScalarNode) and node.tag in _TEXT_TAGS:
            return str(node.value)
        if isinstance(node, ScalarNode) and node.tag in _PLAIN_TAGS:
            return self._scalar(node, path)
        self.report(path, f"tagged {_one_line(str(node.tag))}", "must be a plain value; take the tag away")
        return None

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, object]:
        found: dict[str, object] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            name = _one_line(str(key_node.value)) if isinstance(key_node, ScalarNode) else "?"
            here = (*path, name)
            if not isinstance(key_node, ScalarNode) or key_node.tag not in _TEXT_TAGS:
                self.lines.setdefault(here, line)
                merge = isinstance(key_node, ScalarNode) and key_node.tag == _TAG + "merge"
                remedy = (
                    "merge keys are not read; write the keys out" if merge else "a key must be text; put it in quotes"
                )
                self.report(here, "not a text key", remedy)
            elif name in found:
                self.problems.append(
                    Problem(
                        self.file,
                        line,
                        dotted(here),
                        "written twice",
                        f"first on line {self.lines[here]}; keep one of them",
                    )
                )
            else:
                self.lines[here] = line
                found[name] = self._value(value_node, here)
        return found

    def _scalar(self, node: ScalarNode, path: Path) -> object:
        try:
            value: object = _yaml().constructor.construct_object(node)
        except (ValueError, YAMLError, OverflowError):
            self.report(path, shown(path, node.value), "must be a plain number or word; it cannot be read")
            return None
        return value


def _yaml() -> YAML:
    return YAML(typ="safe", pure=True)


def dotted(path: Path) -> str:
    """A path in the words of a problem: classes.chat.rules[2].class."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _first(error: MarkedYAMLError) -> str:
    return str(error.problem or error.context or "cannot be read")


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def _finding(path: Path, detail: ErrorDetails, schema: Mapping[str, Any]) -> Finding:
    """Say a finding of pydantic in our words."""
    kind = detail["type"]
    value = detail["input"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return path, "unknown", _nearest(str(path[-1]), _known_keys(schema, path[:-1]))
    if kind == "missing":
        return path, "missing", "required; add it"
    return path, shown(path, value), _expectation(kind, detail.get("ctx", {}), value, detail["msg"])


NEAR = 0.65
"""Of the letters that a key and a known one share in order: with less, two short words are taken for one another (foo, pool)."""
_EXPECTATIONS = {
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false",
    "string_type": "must be text; put it in quotes",
    "finite_number": "must be a finite number",
    "dict_type": "must be a mapping (key: value)",
    "dataclass_type": "must be a mapping (key: value)",
    "model_type": "must be a mapping (key: value)",
    "model_attributes_type": "must be a mapping (key: value)",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
}
_BOUNDS = {
    "greater_than": ("must be > {:g}", "gt"),
    "greater_than_equal": ("must be >= {:g}", "ge"),
    "less_than": ("must be < {:g}", "lt"),
    "less_than_equal": ("must be <= {:g}", "le"),
}


def _expectation(kind: str, context: Mapping[str, object], value: object, message: str) -> str:
    if kind in _BOUNDS:
        template, name = _BOUNDS[kind]
        bound = context[name]
        text = template.format(bound)
        if bound == 1 and name in ("lt", "le") and isinstance(value, int | float) and 1 < value <= 100:
            text += f", it is a fraction; write {value / 100:g} for {value:g} %"
        return text
    if kind in ("float_type", "int_type") and isinstance(value, str) and _NUMBER_WITH_UNIT.match(value):
        return _EXPECTATIONS[kind] + "; leave the unit out, it stands in the key's name"
    if kind in ("float_type", "int_type") and isinstance(value, str):
        return _EXPECTATIONS[kind] + "; without quotes"
    if kind == "too_short":
        return f"must have at least {context['min_length']}"
    if kind == "literal_error":
        return f"must be one of {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}"
    if kind == "value_error":
        return str(context["error"])
    return _EXPECTATIONS.get(kind, _one_line(message[:1].lower() + message[1:]))


def _nearest(key: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(key, names, n=1, cutoff=NEAR)
    if close:
        return f"did you mean {close[0]}?"
    return f"known keys are {', '.join(names)}" if names else "no keys are known here; take it out"


def _known_keys(schema: Mapping[str, Any], path: Path) -> Iterable[str]:
    """Keys that the JSON schema allows at `path`; none when it does not say."""
    definitions: Mapping[str, Any] = schema.get("$defs", {})
    nodes = [schema]
    for part in path:
        nodes = [below for node in nodes for below in _below(node, part, definitions)]
    return [name for node in nodes for shape in _shapes(node, definitions) for name in shape.get("properties", {})]


def _below(node: Mapping[str, Any], part: str | int, definitions: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    for shape in _shapes(node, definitions):
        if isinstance(part, int):
            below = [shape.get("items")]
        elif part in shape.get("properties", {}):
            below = [shape["properties"][part]]
        else:
            below = [shape.get("additionalProperties"), *shape.get("patternProperties", {}).values()]
        yield from (one for one in below if isinstance(one, Mapping))


def _shapes(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The object shapes behind references and alternatives."""
    if "$ref" in node:
        yield from _shapes(definitions[node["$ref"].rpartition("/")[2]], definitions)
    for alternative in (*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())):
        yield from _shapes(alternative, definitions)
    yield node
