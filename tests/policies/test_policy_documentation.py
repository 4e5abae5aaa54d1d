"""docs/policies.md names every field of the schema with its default, and the operator examples are good."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies import schema
from policies.document import parse
from tests.field_tables import declared, documented

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "deploy/policies").glob("*.yaml"))

SECTIONS: dict[str, type] = {
    "The document": schema.PolicyDocument,
    "classes.NAME": schema.ClassPolicy,
    "classes.NAME.degrade": schema.Degrade,
    "classify": schema.Classify,
    "classify.rules[]": schema.Rule,
    "classify.shape": schema.Shape,
    "sizing": schema.Sizing,
    "sizing.fixed": schema.FixedSizing,
    "sizing.fixed.engines.NAME": schema.EngineWindows,
    "sizing.aimd": schema.AimdSizing,
    "sizing.gradient": schema.GradientSizing,
    "sizing.rules": schema.RulesSizing,
    "sizing.token_ledger": schema.TokenLedgerSizing,
    "tenants.NAME": schema.Tenant,
}


@pytest.mark.parametrize("title", SECTIONS)
def test_every_field_is_documented_with_its_default(title: str) -> None:
    assert documented(PAGE, title) == declared(SECTIONS[title])


def test_every_part_of_the_schema_has_its_section() -> None:
    parts = {
        one
        for one in vars(schema).values()
        if isinstance(one, type) and hasattr(one, "__pydantic_config__") and one.__module__ == schema.__name__
    }

    assert parts == set(SECTIONS.values())


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.name)
def test_an_operator_example_is_a_good_policy(file: Path) -> None:
    policy = parse(file.read_text(encoding="utf-8"), file.name)

    assert policy.precedence


def test_there_are_operator_examples() -> None:
    assert len(EXAMPLES) >= 3
