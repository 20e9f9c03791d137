"""Decoding the bodies of requests to the project's routes: what cannot be right is refused with 400."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from holdfast.inference.request_error import RequestError
from holdfast.shared.wire.inference_api import GenerateRequest

_T = TypeVar("_T", bound=msgspec.Struct)


def decode_request(body: bytes) -> GenerateRequest:
    """Return the generate request in `body`.

    Raises:
        RequestError: 400, naming the unknown fields or the first wrong value.
    """
    try:
        return decode_body(body, GenerateRequest)
    except RequestError:
        known = GenerateRequest.__struct_fields__
        try:
            unknown = sorted(msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys() - set(known))
        except (ValueError, RecursionError):  # the first error says more
            unknown = []
        if unknown:
            shown = ", ".join(unknown)
            raise RequestError(400, f"unknown fields: {shown:.500}. Allowed: {', '.join(known)}.") from None
        raise


def decode_body(body: bytes, kind: type[_T]) -> _T:
    """Return the `kind` in `body`.

    Raises:
        RequestError: 400, naming the first wrong value.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(400, str(error)) from None
    except (ValueError, RecursionError) as error:  # broken text, too
        raise RequestError(400, f"the body is not JSON: {error}") from None
