"""One HTTP request, and nothing of lrl's client in it."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit


def call(
    url: str, method: str, path: str, headers: dict[str, str], body: bytes | None = None
) -> tuple[int, bytes]:
    """Status and body of the response."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120.0)
    try:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
