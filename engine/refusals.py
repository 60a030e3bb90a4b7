"""Why an engine says no, and the HTTP status that each reason has.

    400 ValueError    404 UnknownPolicy    409 NameTaken      422 BadWeights, Unsupported
    429 Overloaded    500 PolicyFailed     502 ObjectError    503 NotResident, no server
    507 Full

Callers try 404, 429 and 5xx again, here or elsewhere; any other 4xx would be refused every time.
"""

from collections.abc import Awaitable, Callable

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from domain.errors import EngineRefused, EngineUnavailable, ObjectError


class UnknownPolicy(Exception):
    """No resident policy of that name: status 404."""


class NameTaken(Exception):
    """The name stands for other weights already: status 409."""


class BadWeights(Exception):
    """These weights do not make the policy they claim to be: status 422."""


class Unsupported(Exception):
    """An architecture or a way of publishing that this engine cannot serve: status 422."""


class Overloaded(Exception):
    """The waiting queue is full: status 429."""


class PolicyFailed(Exception):
    """The policy's logits are not finite, or its model raised: an answer of status 500."""


class NotResident(Exception):
    """The policy was here, or is on its way; its weights are not the engine's now: status 503."""


class Full(Exception):
    """Every slot holds a policy: status 507."""


STATUS: dict[type[Exception], int] = {
    ValueError: 400,
    UnknownPolicy: 404,
    NameTaken: 409,
    BadWeights: 422,
    Unsupported: 422,
    Overloaded: 429,
    PolicyFailed: 500,
    ObjectError: 502,
    EngineRefused: 502,
    NotResident: 503,
    EngineUnavailable: 503,
    Full: 507,
}


def handlers() -> dict[type[Exception], Callable[[HttpRequest, Exception], Awaitable[Response]]]:
    """What Starlette answers when a handler raises one of them."""
    return {kind: _refusal(status) for kind, status in STATUS.items()}


def _refusal(status: int) -> Callable[[HttpRequest, Exception], Awaitable[Response]]:
    headers = {"Retry-After": "1"} if status == 429 else None

    async def respond(_: HttpRequest, error: Exception) -> Response:
        kind = type(error).__name__
        return JSONResponse(
            {"error": {"message": str(error), "type": kind, "code": status}},
            status_code=status,
            headers=headers,
        )

    return respond
