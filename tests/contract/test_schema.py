"""The service against its own OpenAPI document: whatever is sent, by two users, is answered as the document says."""

import re
from collections.abc import Generator, Iterator
from typing import Any, Final

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import AcceptedNegativeData, FailureGroup
from schemathesis.schemas import APIOperation, BaseSchema
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.contract import routes
from tests.contract.routes import TABLE, Row
from tests.contract.town import Town, town
from tests.harness import PATIENCE_S

# What is well-formed may still be refused: a model that is not there, a limit. All else is to be as documented.
CHECKS: Final = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance, negative_data_rejection, unsupported_method, allow_header_conformance, ignored_auth,
]  # fmt: skip
EXAMPLES: Final = 5
_FUZZ: Final = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# The body of an upload may be anything, and a line of JSON as well.
schemathesis.serializer.alias("application/jsonl", "application/json")
ROWS: Final = {f"{row.method} {row.route}": row for row in TABLE}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Generator[Town]:
    # Nobody is to be told to wait.
    folder = tmp_path_factory.mktemp("town")
    with town(folder, routes.settings(folder, "requests = 100_000")) as made:
        yield made


@pytest.fixture(scope="module")
def schema(shared: Town) -> BaseSchema:
    """Return the document, read."""
    return schemathesis.openapi.from_dict(shared.as_("alice", "GET", "/api/openapi.json").json())


def own(row: Row, place: Town, owner: str) -> tuple[dict[str, str], Any]:
    """Return the names in the path, and the JSON body, of a request about something of the owner's."""
    path, body = row.request(place, owner)
    found = re.fullmatch(re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(row.route)), path)
    assert found is not None, path
    return found.groupdict(), body.get("json")


def covering(schema: BaseSchema, operation: APIOperation) -> Iterator[Case]:
    """Return the cases at and just beyond what the document allows."""
    generation = schema.config.generation_for(operation=operation, phase="coverage")
    yield from schema.iter_coverage_cases(
        operation, generation_modes=list(GenerationMode), generation_config=generation
    )


def fuzzing(operation: APIOperation, names: list[dict[str, str]], body: Any) -> st.SearchStrategy[Case]:
    """Return cases of all kinds; in some the path names what there is, in some the body is a good one, too."""
    made = [operation.as_strategy(mode) for mode in GenerationMode]
    for given_names in names:
        fixed: dict[str, Any] = {"path_parameters": given_names} if given_names else {}
        made += [operation.as_strategy(mode, **fixed) for mode in GenerationMode]
        if body is not None:
            made.append(operation.as_strategy(body=body, media_type="application/json", **fixed))
    return st.one_of(made)


@pytest.mark.parametrize("who", ["alice", "bob", "carol"])
def test_every_answer_is_as_documented(shared: Town, schema: BaseSchema, who: str) -> None:
    session = requests.Session()
    session.trust_env = False
    headers = {"Authorization": f"Bearer {shared.tokens[who]}"}
    failures: list[FailureGroup] = []

    def ask(case: Case) -> None:
        try:
            case.call_and_validate(
                shared.url, session, headers=headers, checks=CHECKS, timeout=PATIENCE_S, allow_redirects=False
            )
        except FailureGroup as group:
            if not is_repetition(case, group):
                failures.append(group)

    for found in schema.get_all_operations():
        operation = found.ok()
        if who == "carol" and (ROWS[operation.label].owner != 403 or operation.label == "POST /api/stop"):
            continue  # The admin is asked what others may not; and to stop is the end.
        names, body = zip(*(own(ROWS[operation.label], shared, owner) for owner in ("alice", "bob")), strict=True)
        for case in covering(schema, operation):
            ask(case)
        _FUZZ(given(fuzzing(operation, list(names), body[0]))(ask))()
    assert not failures, f"{len(failures)} failures; the first of each kind:\n" + "\n".join(shown(failures))


def is_repetition(case: Case, group: FailureGroup) -> bool:
    """Return whether all that failed is that a parameter of the query came several times: then its last counts."""
    is_many = any(isinstance(value, (list, dict)) for value in case.query.values())
    return is_many and all(isinstance(failure, AcceptedNegativeData) for failure in group.exceptions)


def shown(failures: list[FailureGroup]) -> list[str]:
    """Return one failure of each kind and route, as schemathesis tells it."""
    kinds = {f"{failure.operation}: {failure.title}": str(group) for group in failures for failure in group.exceptions}
    return [f"--- {kind}\n{words}" for kind, words in kinds.items()]
