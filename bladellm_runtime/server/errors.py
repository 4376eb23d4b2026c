"""The server's answer to a failed request: OpenAI's error object with an HTTP status."""

from typing import Any

import orjson

from bladellm_runtime.errors import ParameterError

MAX_MESSAGE_CHARS = 500
MAX_SHOWN_CHARS = 64
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that cannot be answered.

    `message` is one sentence for the client; it never carries file paths or more than a few dozen characters of
    the request. `type` follows from `status` unless it is given. `retry_after` is in seconds: the client should
    come back then.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _capped(message)
        self.type = type or error_type(status)
        self.param = _capped(param) if param is not None else None
        self.code = code
        self.retry_after = retry_after

    def body(self) -> bytes:
        """The response body: `{"error": {...}}`, always with all four keys."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})


def error_type(status: int) -> str:
    """OpenAI's error type that belongs to an HTTP status."""
    if status >= 500:
        return "server_error"
    return ERROR_TYPES.get(status, "invalid_request_error")


def invalid_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the client must change the request; `param` is the field as the client wrote it."""
    return ApiError(400, message, param=param, code=code)


def from_parameter_error(error: ParameterError) -> ApiError:
    """The 400 for a request field that `bladellm_runtime.request` refused."""
    return invalid_request(str(error), error.param, error.code)


def model_not_found(name: str) -> ApiError:
    """The 404 for a model name this server does not serve."""
    message = f"The model {shown(name)} does not exist; GET /v1/models lists the names this server answers to"
    return ApiError(404, message, param="model", code="model_not_found")


def generation_error(code: str | None, sentence: str | None = None, param: str | None = None) -> ApiError:
    """The error for a request the engine gave up; `code` and `sentence` are those of its last `RequestDelta`."""
    if code == "constraint_refused":
        return invalid_request(sentence or "The constraint of this request cannot be used", param, code)
    if code == "constraint_failed":
        return ApiError(500, sentence or "The constraint of this request could not be followed to its end", code=code)
    if code == "adapter_refused":
        return invalid_request(sentence or "The adapter cannot be used", param, code)
    if code == "adapter_in_use":
        return ApiError(409, sentence or "Requests use the adapter; try again later", param=param, code=code)
    if code == "context_length_exceeded":
        return invalid_request("The prompt does not fit into the model's context", code=code)
    if code == "invalid_logits":
        return ApiError(500, "The model computed logits that are not numbers; this request was ended", code=code)
    if code == "out_of_memory":
        return ApiError(
            503, "The GPU has no memory left for this request; try again later, or a shorter one", code=code
        )
    return ApiError(500, "The request failed while it was generated", code=code or "generation_failed")


def internal_error() -> ApiError:
    """The 500 for an unexpected exception, whose text stays in the server's log."""
    return ApiError(500, "The server failed to answer this request; its log has the details", code="internal_error")


def shown(value: Any) -> str:
    """A short, safe rendering of a request value for an error message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else "a very large integer"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        # Cut before repr: a client's string may have millions of characters.
        return repr(value) if len(value) <= MAX_SHOWN_CHARS else repr(value[: MAX_SHOWN_CHARS - 3] + "...")
    return "a list" if isinstance(value, list) else "an object"


def _capped(text: str) -> str:
    """`text` cut to the longest message sent, as valid UTF-8."""
    if len(text) > MAX_MESSAGE_CHARS:
        text = text[: MAX_MESSAGE_CHARS - 3] + "..."
    return text.encode("utf-8", "replace").decode()
