"""One request to a model over HTTP, by the openai client. It sends it again where that may help:
after 408, 409, 429 (when Retry-After says), 5xx, a timeout or a lost connection.

Imported at the first request: the client takes seconds and 59 MB to import.
"""

import asyncio
import functools
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import openai
from openai._models import FinalRequestOptions

from lrl.system.endpoint import stays_here


@dataclass
class Unanswered(Exception):
    """There is no answer."""

    reason: str
    requests: int
    status: int | None = None
    """What the server answered; None if nothing."""

    @property
    def refused(self) -> bool:
        """Whether the same request would be refused again."""
        return self.status is not None and self.status not in (408, 409, 429) and self.status < 500


async def post(
    url: str,
    body: dict[str, Any],
    key: str | None,
    *,
    timeout_s: float,
    retries: int,
    deadline_s: float,
    before_request: Callable[[int], Awaitable[None]],
) -> str:
    """Returns the text of the answer to a request.

    Args:
        url: The route.
        body: The request's JSON.
        key: Sent as a bearer token; None for none.
        timeout_s: Seconds for one request.
        retries: Further requests.
        deadline_s: Seconds for all requests and the waits between them.
        before_request: Called before each request with its number, from 1.

    Raises:
        Unanswered: There is none.
    """
    # The client takes what is not given from OPENAI_... variables, which are not for this server.
    left_out = ["OpenAI-Organization", "OpenAI-Project"]
    left_out += ["Authorization"] if key is None else []
    headers = dict.fromkeys(left_out, openai.Omit())
    client = _Client(
        url,
        key=key,
        timeout_s=timeout_s,
        retries=retries,
        before_request=before_request,
    )
    try:
        async with client, asyncio.timeout(deadline_s):
            return await client.post(url, body=body, cast_to=str, options={"headers": headers})
    except openai.APIStatusError as error:
        raise Unanswered(_status_of(error), client.requests, error.status_code) from None
    except openai.APITimeoutError:
        raise Unanswered(f"no answer within {timeout_s:g} s", client.requests) from None
    except openai.APIConnectionError as error:
        cause = error.__cause__ or error
        raise Unanswered(f"{type(cause).__name__}: {cause}", client.requests) from None
    except TimeoutError:
        raise Unanswered(f"no answer within {deadline_s:g} s in all", client.requests) from None


class _Client(openai.AsyncOpenAI):
    """A client for one request: an idle connection may be closed as the next one goes out on it."""

    def __init__(
        self,
        url: str,
        key: str | None,
        timeout_s: float,
        retries: int,
        before_request: Callable[[int], Awaitable[None]],
    ) -> None:
        super().__init__(
            base_url=url,
            api_key=key or "not sent",
            timeout=timeout_s,
            max_retries=retries,
            http_client=openai.DefaultAsyncHttpxClient(
                follow_redirects=False,  # a POST would become a GET
                trust_env=not stays_here(urlsplit(url).hostname or ""),  # proxies do not lead here
                verify=_certificates(),
            ),
        )
        self.requests = 0
        self._before_request = before_request

    async def _prepare_options(self, options: FinalRequestOptions) -> FinalRequestOptions:
        self.requests += 1
        await self._before_request(self.requests)
        return await super()._prepare_options(options)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Reading them takes 60 ms, so not for each client."""
    return ssl.create_default_context()


def _status_of(error: openai.APIStatusError) -> str:
    message = error.body
    if isinstance(message, dict):
        message = message.get("message", message)
    if 300 <= error.status_code < 400:
        message = f"elsewhere: {error.response.headers.get('Location', '')!r:.80}"
    return f"status {error.status_code}: {message}"
