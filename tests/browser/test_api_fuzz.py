"""The API fuzzed from its own description: no server error, no undocumented reply, no bad data taken."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed
from hypothesis import settings as limits

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
pytestmark = pytest.mark.browser

MODES = schemathesis.GenerationMode


@pytest.mark.parametrize("mode", [MODES.POSITIVE, MODES.NEGATIVE], ids=["good data", "bad data"])
def test_the_api_keeps_its_word(serve: Callable[..., Any], model: Any, mode: Any) -> None:
    server = serve("--model", str(model))
    description = schemathesis.openapi.from_url(server.address + "api/openapi.json")
    tried = []
    for found in description.get_all_operations():
        operation = found.ok()
        tried.append(f"{operation.method.upper()} {operation.path}")

        @seed(0)
        @limits(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def fuzz(case: Any) -> None:
            case.call_and_validate()

        if mode == MODES.POSITIVE or operation.body or operation.query or operation.path_parameters:
            fuzz()
    assert len(tried) >= 12
    assert server.get("api/state")["contradictions"] >= 0
