"""The request fields that constrain an answer: `guided_json` and its like, and `response_format`."""

from collections.abc import Mapping
from typing import Any

from bladellm_runtime.guided.constraint import FIELDS, ConstraintError, constraint_of
from bladellm_runtime.request import Constraint, SamplingParams
from bladellm_runtime.server.errors import invalid_request
from bladellm_runtime.server.fields import Fields

REFUSED = "constraint_refused"
"""The code of a constraint that cannot be used, whether its form shows it or its compilation."""
_STOPS = ("stop", "stop_token_ids", "stop_tokens", "include_stop_str_in_output")


def read_constraint(body: Mapping[str, Any], fields: Fields, params: SamplingParams) -> Constraint | None:
    """What the answer must satisfy; None without a constraint.

    Raises `ApiError` 400, code `REFUSED`: more than one constraint, one that cannot be used, or beside it a stop that
    would cut the answer before it satisfies the constraint.
    """
    fields.ignore(FIELDS)
    try:
        constraint = constraint_of(body)
    except ConstraintError as error:
        raise invalid_request(str(error), error.param, REFUSED) from None
    if constraint is not None:
        _check_stops(constraint, fields, params)
    return constraint


def _check_stops(constraint: Constraint, fields: Fields, params: SamplingParams) -> None:
    if not (params.stop or params.stop_token_ids or params.include_stop_str_in_output):
        return
    name = next(name for name in _STOPS if fields.take(name))
    raise invalid_request(
        f"{name} cannot be combined with {constraint.field}: the answer would not satisfy the constraint; "
        "leave one of them out",
        name,
        REFUSED,
    )
