"""The fields of a request's JSON body, each of the right type or refused by name."""

import json
from typing import Any

from starlette.requests import Request as HttpRequest


async def object(http: HttpRequest) -> dict[str, Any]:
    """The body as a JSON object."""
    try:
        body = json.loads(await http.body())
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return body


def text(body: dict[str, Any], field: str, default: str | None = None) -> str:
    """A string; without a default it must not be empty."""
    value = body.get(field, default)
    if not isinstance(value, str) or (default is None and not value):
        raise ValueError(f"{field} must be a string, not {value!r}")
    return value


def integer(body: dict[str, Any], field: str, default: int, least: int | None = None) -> int:
    """A whole number, of at least `least`."""
    value = body.get(field, default)
    if type(value) is not int or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{field} must be an integer{bound}, not {value!r}")
    return value


async def disconnected(http: HttpRequest) -> None:
    """Return once the caller has gone; read the body first."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
