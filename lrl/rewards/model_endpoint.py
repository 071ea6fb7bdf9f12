"""A model behind an HTTP endpoint: its address, its key, and what an answer and a failure are."""

import asyncio
import functools
import json
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from lrl.errors import ConfigError, CountedError
from lrl.system.endpoint import stays_here

T = TypeVar("T")
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
_SHOWN = 160
"""Characters of a server's text in a message."""
_certificates = functools.cache(ssl.create_default_context)
"""Reading them takes 60 ms, so not for each client."""


@dataclass
class ModelEndpoint:
    """A route of a model's server. The openai client asks it, and again after 408, 409, 429 (when
    Retry-After says), 5xx, a timeout or a lost connection.

    Args:
        kind: The beginning of the kinds of its errors: `<kind>_refused`, `<kind>_failed`.
        route: Such as `/v1/completions`.
        url: `http://host:port`, `https://host/v1`, or the whole address of the route; then the
            latter.
        api_key_env: Name of the environment variable with the key; None for no key. The key itself
            is read for each answer, and never stored or sent to another process.
        timeout_s: Seconds for one request.
        retries: Further requests for an answer.
        deadline_s: Seconds for an answer, all requests and the waits between them.
        error: Class of its errors.
    """

    kind: str
    route: str
    url: str
    api_key_env: str | None
    timeout_s: float
    retries: int
    deadline_s: float
    error: type[CountedError] = CountedError

    def __post_init__(self) -> None:
        address = urlsplit(self.url)
        if "@" in address.netloc:
            raise ConfigError("A url has a user or a password in it (not shown): set api_key_env.")
        path, end = address.path.rstrip("/"), self.route.removeprefix("/v1")
        if not path.endswith(end):
            path += end if path else self.route
        self.url = address._replace(path=path).geturl()

    async def ask(self, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        """Returns the answer to a request; raises an `error` of kind `<kind>_refused`, or of kind
        `<kind>_failed` after all requests.

        Args:
            body: The request's JSON.
            read: Returns the answer in the JSON of a response; any error of reading is a refusal.
        """
        text = await self._posted(body)
        try:
            return read(json.loads(text))
        except _UNREADABLE as error:
            shown = self._shown(text)
            raise self.refused(f"cannot read its answer ({error!r:.80}): {shown!r}") from error

    async def tokens_of(self, text: str) -> tuple[list[int], int]:
        """Returns the tokens that a vLLM server makes of a text, without special ones, and the most
        tokens of a request, those that it writes included. It is asked once."""
        server = self.url.removesuffix(self.route.removeprefix("/v1")).removesuffix("/v1")
        tokenize = replace(self, route="/tokenize", url=server, retries=0)
        return await tokenize.ask(
            {"prompt": text, "add_special_tokens": False},
            lambda found: (list(map(int, found["tokens"])), int(found["max_model_len"])),
        )

    def refused(self, message: str) -> CountedError:
        """Returns the error of a request that would be refused again."""
        return self.error(f"{self.kind}_refused", f"{self.url}: {message}")

    async def _posted(self, body: dict[str, Any]) -> str:
        import openai  # here: it takes seconds and 59 MB

        key = self._key()
        if key == "":
            raise self.refused("api_key_env names a variable that is not set on this machine")
        # A client for each answer: a server may close an idle connection as a request goes out.
        client = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=key or "none",
            timeout=self.timeout_s,
            max_retries=self.retries,
            http_client=openai.DefaultAsyncHttpxClient(
                follow_redirects=False,  # to a host that nobody has named, and a POST becomes a GET
                trust_env=not stays_here(urlsplit(self.url).hostname or ""),  # no proxy leads here
                verify=_certificates(),
            ),
        )
        client.organization = client.project = None  # OpenAI's, of the environment
        try:
            async with client, asyncio.timeout(self.deadline_s):
                without: Any = {} if key else {"headers": {"Authorization": openai.Omit()}}
                return await client.post(self.url, body=body, cast_to=str, options=without)
        except openai.APIStatusError as error:
            reason = self._shown(str(error))
            if error.status_code not in (408, 409, 429) and error.status_code < 500:
                raise self.refused(reason) from None
        except (openai.APITimeoutError, TimeoutError):
            reason = "no answer in time"
        except openai.APIConnectionError as error:
            reason = self._shown(repr(error.__cause__ or error))
        raise self.error(
            f"{self.kind}_failed",
            f"{self.url}: {reason}, also when asked again (timeout_s {self.timeout_s:g}, retries "
            f"{self.retries}, deadline_s {self.deadline_s:g})",
        )

    def _shown(self, text: str) -> str:
        """Returns the beginning of a server's text, without the key, which it may repeat."""
        text = " ".join(text.split())
        key = self._key()
        return (text.replace(key, "***") if key else text)[:_SHOWN]

    def _key(self) -> str | None:
        """Returns the key, "" if it is not set here, and None if none is sent."""
        return self.api_key_env and os.environ.get(self.api_key_env, "").strip()
