"""A policy file's text into one frozen `Policy`, or every reason why not.

Pure: text in, value or `DocumentError` out. Nothing is opened, and a document is taken whole or not at all, so that a
bad edit can never be half in force. What types cannot say is checked here: names that refer to classes and engines,
and windows that would leave no room for works with a TTFT objective.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter
from ruamel.yaml import YAML

from policies.schema import Classify, Degrade, EngineWindows, FixedSizing, Policy, PolicyDocument, Rule, Shape
from policies.yaml_source import Finding, load, shown

USUAL_PROMPT_TOKENS = 1000
"""Of a prompt by which classes with a `ttft_slowdown` are set beside the others."""


def parse(text: str, file: str, *, engines: Collection[str] | None = None) -> Policy:
    """Read a policy document.

    file      the name shown in problems
    engines   names of the configured engines, so that windows for an unknown one are refused; None: not known here
    Raises DocumentError (policies.yaml_source) with every problem found.
    """
    document = load(text, PolicyDocument, file, check=partial(_findings, engines=engines))
    return build(document, version=hashlib.sha256(text.encode()).hexdigest()[:12])


def build(document: PolicyDocument, *, version: str) -> Policy:
    """Fill in what the document leaves open. The document must be consistent: `parse` checks, this does not."""
    precedence = _precedence(document)
    light, heavy = _shape_classes(document, precedence)
    shape = replace(document.classify.shape, light=light, heavy=heavy)
    rules = document.classify.rules
    if rules is None:
        rules = (
            Rule(class_from="X-Headrace-Class"),
            Rule(class_name=heavy, service_tier="flex"),
            Rule(class_name=light, service_tier="priority"),
        )
    sizing = replace(document.sizing, fixed=_filled_windows(document))
    return Policy(
        version=version,
        classes=document.classes,
        classify=Classify(rules=rules, shape=shape, learn=document.classify.learn),
        sizing=sizing,
        tenants=document.tenants,
        precedence=precedence,
    )


def effective(policy: Policy) -> dict[str, Any]:
    """The policy as plain values under the document's keys, defaults filled in; reading it again gives the same."""
    document = PolicyDocument(
        version=1, classes=policy.classes, classify=policy.classify, sizing=policy.sizing, tenants=policy.tenants
    )
    plain: dict[str, Any] = TypeAdapter(PolicyDocument).dump_python(document, mode="json", by_alias=True)
    plain["classify"]["rules"] = [
        {key: value for key, value in rule.items() if value not in (None, {})} for rule in plain["classify"]["rules"]
    ]
    return plain


def render(policy: Policy) -> str:
    """`effective` as YAML text."""
    yaml = YAML()
    yaml.indent(mapping=2, sequence=4, offset=2)
    buffer = io.StringIO()
    yaml.dump(effective(policy), buffer)
    return buffer.getvalue()


def _precedence(document: PolicyDocument) -> tuple[str, ...]:
    """Most urgent first; sorted() is stable, so equals keep the document's order."""

    def urgency(name: str) -> float:
        one = document.classes[name]
        if one.ttft_slowdown is None:
            return math.inf if one.ttft_sla_s is None else one.ttft_sla_s
        return one.ttft_objective_s(USUAL_PROMPT_TOKENS) or math.inf

    return tuple(sorted(document.classes, key=urgency))


def _shape_classes(document: PolicyDocument, precedence: tuple[str, ...]) -> tuple[str, str]:
    patient = [name for name in precedence if not document.classes[name].has_ttft_objective]
    shape = document.classify.shape
    return shape.light or precedence[0], shape.heavy or (patient or precedence[-1:])[0]


def _common_windows(document: PolicyDocument) -> dict[str, int]:
    """Every class's window on an engine that the document does not single out."""
    fixed = document.sizing.fixed
    patient = sum(not one.has_ttft_objective for one in document.classes.values())
    quarter = max(1, fixed.total // (4 * max(1, patient)))
    defaults = {name: fixed.total if one.has_ttft_objective else quarter for name, one in document.classes.items()}
    return {**defaults, **fixed.windows}


def _engine_windows(document: PolicyDocument, one: EngineWindows) -> dict[str, int]:
    """Every class's window on an engine with its own total: in proportion, unless named."""
    fixed = document.sizing.fixed
    total = one.total or fixed.total
    scaled = {name: max(1, window * total // fixed.total) for name, window in _common_windows(document).items()}
    return {**scaled, **one.windows}


def _filled_windows(document: PolicyDocument) -> FixedSizing:
    fixed = document.sizing.fixed
    engines = {
        name: EngineWindows(one.total or fixed.total, _engine_windows(document, one))
        for name, one in fixed.engines.items()
    }
    return FixedSizing(fixed.total, _common_windows(document), engines)


def _findings(document: PolicyDocument, *, engines: Collection[str] | None) -> Iterator[Finding]:
    yield from _classify_findings(document)
    yield from _class_findings(document)
    yield from _window_findings(document, engines)
    for name, tenant in document.tenants.items():
        if tenant.highest_class is not None:
            yield from _reference(document, ("tenants", name, "highest_class"), tenant.highest_class)


def _reference(document: PolicyDocument, path: tuple[str | int, ...], name: str) -> Iterator[Finding]:
    if name not in document.classes:
        yield path, shown(path, name), f"must name a class: {', '.join(document.classes)}"


def _class_findings(document: PolicyDocument) -> Iterator[Finding]:
    for name, one in document.classes.items():
        if one.ttft_slowdown is not None and one.ttft_sla_s is not None:
            path = ("classes", name, "ttft_slowdown")
            yield path, shown(path, one.ttft_slowdown), "stands in place of ttft_sla_s; leave one of them out"
        if one.ttft_sla_s is None and one.ttft_sla_per_1k_tokens_s:
            path = ("classes", name, "ttft_sla_per_1k_tokens_s")
            yield path, shown(path, one.ttft_sla_per_1k_tokens_s), "needs ttft_sla_s beside it, which it is added to"
        if one.on_infeasible != "late" and not one.has_ttft_objective:
            path = ("classes", name, "on_infeasible")
            yield (
                path,
                shown(path, one.on_infeasible),
                "needs ttft_sla_s or ttft_slowdown: nothing is late without an objective",
            )
        if one.on_infeasible == "degrade" and one.degrade == Degrade():
            yield ("classes", name, "degrade"), "empty", "must say model or max_tokens, since on_infeasible is degrade"
    shares = sum(one.min_share for one in document.classes.values() if not one.has_ttft_objective)
    if shares > 1:
        yield ("classes",), "a mapping", f"min_share of all classes without ttft_sla_s adds up to {shares:g}; at most 1"


def _classify_findings(document: PolicyDocument) -> Iterator[Finding]:
    shape: Shape = document.classify.shape
    for key in ("light", "heavy"):
        name = getattr(shape, key)
        if name is not None:
            yield from _reference(document, ("classify", "shape", key), name)
    for index, rule in enumerate(document.classify.rules or ()):
        path = ("classify", "rules", index)
        if (rule.class_name is None) == (rule.class_from is None):
            yield path, "a rule", "must have exactly one of class and class_from"
        if rule.class_name is not None:
            yield from _reference(document, (*path, "class"), rule.class_name)


def _window_findings(document: PolicyDocument, engines: Collection[str] | None) -> Iterator[Finding]:
    fixed = document.sizing.fixed
    base: tuple[str | int, ...] = ("sizing", "fixed")
    yield from _room_findings(document, base, fixed.total, fixed.windows, _common_windows(document))
    for name, one in fixed.engines.items():
        path = (*base, "engines", name)
        if engines is not None and name not in engines:
            yield path, "an unknown engine", f"must be one of {', '.join(sorted(engines)) or '(none is configured)'}"
        yield from _room_findings(document, path, one.total or fixed.total, one.windows, _engine_windows(document, one))


def _room_findings(
    document: PolicyDocument,
    path: tuple[str | int, ...],
    total: int,
    written: Mapping[str, int],
    filled: Mapping[str, int],
) -> Iterator[Finding]:
    for name, window in written.items():
        here = (*path, "windows", name)
        if name not in document.classes:
            yield here, "no class", f"must be one of {', '.join(document.classes)}"
        elif window > total:
            yield here, str(window), f"must be <= total ({total})"
    patient = [name for name, one in document.classes.items() if not one.has_ttft_objective]
    taken = sum(filled[name] for name in patient)
    if len(patient) < len(document.classes) and total > 1 and taken >= total:
        yield (
            (*path, "windows"),
            f"{taken} for {' and '.join(patient)}",
            f"classes without ttft_sla_s must have < total ({total}) together, so that the others always find room",
        )
