"""JSON over HTTP."""

import json
from urllib.request import Request, urlopen


def answer(address: str, body: object = None, timeout: float = 30) -> bytes:
    """What an address answers within so many seconds, to what is posted if there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(address, data, {"Content-Type": "application/json"})  # noqa: S310
    with urlopen(request, timeout=timeout) as said:  # noqa: S310  # no address comes from data
        read: bytes = said.read()
    return read
