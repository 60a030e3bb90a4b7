"""Errors in the form of the OpenAI API."""


class ApiError(Exception):
    """An answer in the API's own form that is no success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        again: bool = False,
    ) -> None:
        """An error.

        Args:
            status: of HTTP.
            message: for people.
            code: for programs.
            param: the field of the request that it is about.
            again: whether clients should send the same request again.
        """
        super().__init__(message)
        self.status = status
        self.again = again
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's clients obey this one."""
        return {"x-should-retry": "true" if self.again else "false"}
