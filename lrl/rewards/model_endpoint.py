"""A model behind an HTTP endpoint: its address, its key, and what an answer and a failure are."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import logging
import os
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

from lrl.errors import ConfigError, CountedError, LrlError, TeacherError
from lrl.system.config_errors import above, at_least
from lrl.system.endpoint import stays_here

log = logging.getLogger(__name__)

T = TypeVar("T")
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
_SHOWN = 160
"""Characters of a server's text in a message."""


class NotSent(BaseException):
    """Why a request is not sent. Not an `Exception`: the client would try it again."""


@dataclass
class ModelEndpoint:
    """A route of a model's server. The openai client asks it, and again after 408, 409, 429 (when
    Retry-After says), 5xx, a timeout or a lost connection.

    Args:
        owner: The class with these settings, in messages.
        kind: The beginning of the kinds of its errors: `<kind>_refused`, `<kind>_failed`.
        error: Their class.
        route: Such as `/v1/completions`.
        url: `http://host:port`, `https://host/v1`, or the whole address of the route; then the
            latter.
        api_key_env: Name of the environment variable with the key; None for no key. The key itself
            is read for each answer, and never stored or sent to another process.
        timeout_s: Seconds for one request.
        retries: Further requests for an answer.
        deadline_s: Seconds for an answer, all requests and the waits between them.
    """

    owner: str
    kind: str
    error: type[CountedError | TeacherError]
    route: str
    url: str
    api_key_env: str | None
    timeout_s: float
    retries: int
    deadline_s: float

    def __post_init__(self) -> None:
        at_least(0, self.owner, retries=self.retries)
        above(0, self.owner, timeout_s=self.timeout_s, deadline_s=self.deadline_s)
        address = urlsplit(self.url)
        if "@" in address.netloc:
            raise ConfigError(
                f"{self.owner}.url has a user or a password in it (not shown): give the key in "
                f"the environment variable that {self.owner}.api_key_env names."
            )
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigError(f"{self.owner}.url is {self.url!r:.80}: give http://host:port.")
        path = address.path.rstrip("/")
        end = self.route.removeprefix("/v1")
        if not path.endswith(end):
            path = path + end if path else self.route
        self.url = urlunsplit((address.scheme, address.netloc, path, address.query, ""))
        if self.api_key_env is None:
            return
        if not self._key():
            is_name = re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.api_key_env)
            shown = self.api_key_env if is_name else "(it may be the key itself)"
            raise ConfigError(
                f"{self.owner}.api_key_env names an environment variable {shown}, which is not "
                f"set: set it to the key, and give its name, such as {self.kind.upper()}_API_KEY."
            )
        if address.scheme == "http" and not stays_here(address.hostname):
            log.warning(
                "%s.url is %s: anyone able to read that network sees the key. Use https if the "
                "endpoint has it.",
                self.owner,
                self.url,
            )

    def once(self) -> Self:
        """Returns the same route, asked once."""
        found = copy.copy(self)
        found.retries = 0
        return found

    def sibling(self, route: str) -> Self:
        """Returns another route of the server, asked once."""
        found = self.once()
        server = self.url.removesuffix(self.route.removeprefix("/v1")).removesuffix("/v1")
        found.route = route
        found.url = server + route
        return found

    async def ask(
        self,
        body: dict[str, Any],
        read: Callable[[Any], T],
        before_request: Callable[[int], Awaitable[None]] | None = None,
    ) -> T:
        """Returns the answer to a request; raises an `error` of kind `<kind>_refused`, or of kind
        `<kind>_failed` after all requests.

        Args:
            body: The request's JSON.
            read: Returns the answer in the JSON of a response; any error of reading is a refusal.
            before_request: Called before each request with its number, from 1; an `error` that it
                raises ends the request.
        """
        text = await self._posted(body, before_request)
        try:
            return read(json.loads(text))
        except _UNREADABLE as error:
            shown = self._shown(text)
            raise self.refused(f"cannot read its answer ({error!r:.80}): {shown!r}") from error

    def refused(self, message: str) -> LrlError:
        """Returns the error of a request that would be refused again."""
        return self.error(f"{self.kind}_refused", f"{self.url}: {message}")

    async def _posted(
        self, body: dict[str, Any], before_request: Callable[[int], Awaitable[None]] | None
    ) -> str:
        import openai  # here: it takes seconds and 59 MB

        requests = 0

        async def count(request: object) -> None:
            nonlocal requests
            requests += 1
            try:
                if before_request is not None:
                    await before_request(requests)
            except self.error as error:
                raise NotSent(error) from error

        key = self._key()
        if key == "":
            raise self.refused(
                f"the environment variable {self.api_key_env} ({self.owner}.api_key_env) is not "
                "set on this machine"
            )
        # The client takes what is not given from OPENAI_... variables, not meant for this server.
        left_out = ["OpenAI-Organization", "OpenAI-Project"]
        left_out += ["Authorization"] if key is None else []
        options: Any = {"headers": dict.fromkeys(left_out, openai.Omit())}
        # A client for each answer: a server may close an idle connection as a request goes out.
        client = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=key or "not sent",
            timeout=self.timeout_s,
            max_retries=self.retries,
            http_client=openai.DefaultAsyncHttpxClient(
                follow_redirects=False,  # a POST would become a GET
                trust_env=not stays_here(urlsplit(self.url).hostname or ""),  # no proxy leads here
                verify=_certificates(),
                event_hooks={"request": [count]},
            ),
        )
        try:
            async with client, asyncio.timeout(self.deadline_s):
                return await client.post(self.url, body=body, cast_to=str, options=options)
        except NotSent as not_sent:
            raise not_sent.args[0] from None
        except openai.APIStatusError as error:
            reason = self._shown(str(error))
            if error.status_code not in (408, 409, 429) and error.status_code < 500:
                raise self.refused(f"{reason}. See the settings of {self.owner}") from None
        except openai.APITimeoutError:
            reason = f"no answer within {self.timeout_s:g} s"
        except openai.APIConnectionError as error:
            reason = self._shown(repr(error.__cause__ or error))
        except TimeoutError:
            reason = f"no answer within {self.deadline_s:g} s in all"
        raise self.error(
            f"{self.kind}_failed",
            f"{self.url}: {reason}. No answer to {requests} requests ({self.owner}.retries is "
            f"{self.retries}) within {self.owner}.deadline_s ({self.deadline_s:g})",
        )

    def _shown(self, text: str) -> str:
        """Returns the beginning of a server's text, without the key, which it may repeat."""
        text = " ".join(text.split())
        key = self._key()
        return (text.replace(key, "***") if key else text)[:_SHOWN]

    def _key(self) -> str | None:
        """Returns the key that is set here, "" if it is not, and None if none is sent."""
        return self.api_key_env and os.environ.get(self.api_key_env, "").strip()


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Reading them takes 60 ms, so not for each client."""
    return ssl.create_default_context()
