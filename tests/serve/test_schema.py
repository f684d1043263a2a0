"""The document that the server publishes, and requests made up from it: none is answered 500."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.specs.openapi.checks import response_schema_conformance

from .conftest import Running

EXAMPLES = int(os.environ.get("BITNEST_SCHEMA_EXAMPLES", "60"))  # of each path
ALLOWED = {200, 400, 404, 405, 413, 415, 429, 503}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_no_request_is_answered_with_a_bug(running: Running, path: str) -> None:
    """Made up by schemathesis, valid and not."""
    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    operation = schema[path]["POST"]
    seen: list[int] = []

    @hypothesis.given(
        case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
    )
    @hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    def one(case: Any) -> None:
        response = case.call(base_url=running.url)
        seen.append(response.status_code)
        assert response.status_code in ALLOWED, response.text
        if response.status_code != 200:
            case.validate_response(response, checks=[response_schema_conformance])

    one()
    assert len(seen) > 30
    assert set(seen) - {200}
