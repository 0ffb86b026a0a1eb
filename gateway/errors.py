"""Errors that a client sees, each with its HTTP status and OpenAI error body.

    GatewayError
    |-- BadRequest            400 malformed, wrong type, out of range, not supported
    |   `-- ContextExceeded   400 prompt and answer do not fit the model's context
    |-- Unauthorized          401 no key, or a wrong one
    |-- UnknownModel          404 no worker serves this model
    |-- RequestTimeout        408 the body did not arrive in time
    |-- BodyTooLarge          413
    |-- TenantBusy            429 this key has too many requests in flight; Retry-After
    |-- WorkerLost            502 the workers failed in the middle of an answer
    `-- NoCapacity            503 no worker, all busy, or draining; Retry-After

    ClientGone                nobody listens any more: nothing is sent
    ConfigError (ValueError)  a setting that cannot be used: the process does not start
    CannotListen (OSError)    the address is taken, or not this machine's

Errors of the workers are translated once, in ``generate.py``.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar


class GatewayError(Exception):
    """Base of all answers that are not a completion. ``param`` names the field at fault, if there is one."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code_default: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code_default
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The error as OpenAI shapes it."""
        return error_body(self.message, self.kind, param=self.param, code=self.code)

    def headers(self) -> dict[str, str]:
        """Whole seconds, at least one, where the client may come again."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


class BadRequest(GatewayError):
    status = 400
    kind = "invalid_request_error"


class ContextExceeded(BadRequest):
    code_default = "context_length_exceeded"


class Unauthorized(GatewayError):
    status = 401
    kind = "invalid_request_error"
    code_default = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class UnknownModel(GatewayError):
    status = 404
    kind = "invalid_request_error"
    code_default = "model_not_found"


class RequestTimeout(GatewayError):
    status = 408
    kind = "invalid_request_error"
    code_default = "request_timeout"


class BodyTooLarge(GatewayError):
    status = 413
    kind = "invalid_request_error"
    code_default = "request_too_large"


class TenantBusy(GatewayError):
    status = 429
    kind = "rate_limit_error"
    code_default = "rate_limit_exceeded"


class WorkerLost(GatewayError):
    status = 502
    code_default = "worker_lost"


class NoCapacity(GatewayError):
    status = 503
    code_default = "no_capacity"


class ClientGone(Exception):
    """The client closed its connection; the work is cancelled and nothing is sent."""


class ConfigError(ValueError):
    """A setting that cannot be used."""


class CannotListen(OSError):
    """The address is taken, or not this machine's: nothing is wrong with the setting as such, and it may pass."""


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An OpenAI error body."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
