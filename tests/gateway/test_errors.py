"""How a refusal is spelled."""

from __future__ import annotations

import orjson
import pytest

from gateway.errors import Dialect, Refusal, render_body, render_event


@pytest.mark.parametrize(
    "refusal",
    [Refusal(400, "m"), Refusal(400, "m", reason="why"), Refusal(400, "m", code=400), Refusal(400, "m", code="why")],
    ids=str,
)
@pytest.mark.parametrize("dialect", [Dialect.OPENAI, Dialect.RESPONSES])
def test_the_code_of_an_error_that_we_write_is_always_a_string(refusal: Refusal, dialect: Dialect) -> None:
    whole = orjson.loads(render_body(refusal, dialect))["error"]
    event = orjson.loads(render_event(refusal, dialect).split(b"data: ")[1])

    assert isinstance(whole["code"], str)
    assert isinstance(event.get("error", event)["code"], str)
