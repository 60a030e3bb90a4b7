"""Which errors are about a command, and which about Temporal."""

import pytest
from temporalio.service import RPCError, RPCStatusCode

from activities.relay import _is_refusal


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (RPCError("workflow id is too long", RPCStatusCode.INVALID_ARGUMENT, b""), True),
        (ValueError("a payload of an older version"), True),
        (RPCError("tcp connect error", RPCStatusCode.UNAVAILABLE, b""), False),
        (RPCError("Namespace n is not found.", RPCStatusCode.NOT_FOUND, b""), False),
        (
            RPCError(
                "Namespace n has no mapping defined for search attribute RollbookRun",
                RPCStatusCode.INVALID_ARGUMENT,
                b"",
            ),
            False,
        ),
    ],
)
def test_only_what_is_said_of_the_command_counts_against_it(
    error: Exception, refused: bool
) -> None:
    assert _is_refusal(error) is refused
