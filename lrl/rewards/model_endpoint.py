"""A model behind an HTTP endpoint: one answer to one request, sent again where that may help.

What may pass by itself is tried again: 429, 5xx, a timeout, a lost connection. A request that is
refused would be refused again. A connection for each answer, as it costs little beside the time of
a model, and an idle one may be closed as a request goes out on it.
"""

import asyncio
import json
import logging
import math
import os
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from lrl.errors import ConfigError, CountedError, LrlError, TeacherError
from lrl.system.auth import bearer
from lrl.system.config_errors import above, at_least
from lrl.system.endpoint import stays_here

log = logging.getLogger(__name__)

T = TypeVar("T")
FIRST_WAIT_S = 1.0
"""Seconds before the second request; each further wait is twice as long, up to `LONGEST_WAIT_S`."""
LONGEST_WAIT_S = 30.0
_SHORTEST_S = 0.001
NO_ANSWER = (
    *(ValueError, LookupError, TypeError, AttributeError),
    *(OverflowError, RecursionError),  # numbers beyond every float, and brackets without an end
)
"""Errors of reading what is no answer."""
_PASSES_BY_ITSELF = {408, 429, *range(500, 600)}
_SHOWN = 160


class Trouble(NamedTuple):
    """Why there is no answer yet."""

    reason: str
    retry_after_s: float = 0.0


class _Found(NamedTuple, Generic[T]):
    """The answer."""

    answer: T


class ModelEndpoint(ABC, Generic[T]):
    """Asks a model behind an endpoint, again where that may help. A subclass reads the answer.

    Args:
        url: `http://host:port`, `https://host/path`, or the whole address of the route.
        api_key_env: Name of the environment variable with the key; None for no key. The key itself
            is read at each request, and never stored or sent to another process.
        timeout_s: Seconds for one request.
        retries: Further requests for an answer.
        deadline_s: Seconds for an answer, all requests and the waits between them.

    Raises:
        ConfigError: `url` is no address, there is no key, or the times do not fit together.
    """

    owner: ClassVar[str]
    """The class that has these settings, in messages."""
    kind: ClassVar[str]
    """The beginning of the kinds of its errors: `<kind>_refused`, `<kind>_failed`."""
    error: ClassVar[type[CountedError | TeacherError]]
    route: ClassVar[str]
    first_path: ClassVar[str] = ""
    """What stands before the route if `url` has no path."""
    answers_with: ClassVar[str]
    """What an answer is, in messages."""
    remedies: ClassVar[Mapping[int, str]]
    """What to do about a status."""

    def __init__(
        self, url: str, api_key_env: str | None, timeout_s: float, retries: int, deadline_s: float
    ) -> None:
        at_least(0, self.owner, retries=retries)
        above(0, self.owner, timeout_s=timeout_s, deadline_s=deadline_s)
        if timeout_s > deadline_s:
            raise ConfigError(
                f"{self.owner}.timeout_s is {timeout_s:g}, and {self.owner}.deadline_s, for all "
                f"requests of a response, is {deadline_s:g}: raise deadline_s, or lower timeout_s."
            )
        self.url = self.address_of(url)
        self.api_key_env = api_key_env
        self.timeout_s = timeout_s
        self.retries = retries
        self.deadline_s = deadline_s
        if api_key_env is not None:
            self._check_key(api_key_env)
            self._warn_if_readable()

    @abstractmethod
    def read(self, found: Any) -> T:
        """Returns the answer in the JSON of a response.

        Raises:
            One of `NO_ANSWER`: There is none.
        """

    async def answer(
        self,
        body: dict[str, Any],
        before_request: Callable[[float], Awaitable[None]] | None = None,
    ) -> T:
        """Returns the answer to a request.

        Args:
            body: The request's JSON.
            before_request: Called before each request, with the time on the loop's clock at which
                it must have returned.

        Raises:
            LrlError: An `error` of kind `<kind>_refused`, or of kind `<kind>_failed` after all
                requests.
        """
        until = asyncio.get_running_loop().time() + self.deadline_s
        async with aiohttp.ClientSession(headers=self._headers()) as session:
            for number in range(1, self.retries + 2):
                if before_request is not None:
                    await before_request(until)
                found = await self._request(session, body, until)
                if isinstance(found, _Found):
                    return found.answer
                await self._wait(number, found, until)
        raise AssertionError("the wait after the last request raises")

    async def _wait(self, number: int, trouble: Trouble, until: float) -> None:
        """Waits after request `number`; raises an `error` if it was the last one."""
        requests = f"{number} request{'s' * (number > 1)}"
        if number > self.retries:
            raise self._failed(trouble, f"{requests} ({self.owner}.retries is {self.retries})")
        wait_s = max(_backoff_s(number), trouble.retry_after_s)
        if asyncio.get_running_loop().time() + wait_s >= until:
            late = f"the next could start in {wait_s:.0f} s, beyond {self.owner}.deadline_s"
            raise self._failed(trouble, f"{requests}; {late} ({self.deadline_s:g})")
        await asyncio.sleep(wait_s)

    def _failed(self, trouble: Trouble, requests: str) -> LrlError:
        message = f"{self.url}: {trouble.reason}. No answer to {requests}"
        return self.error(f"{self.kind}_failed", message)

    def refused(self, message: str) -> LrlError:
        """Returns the error of a request that would be refused again."""
        return self.error(f"{self.kind}_refused", f"{self.url}: {message}")

    async def _request(
        self, session: aiohttp.ClientSession, body: dict[str, Any], until: float
    ) -> _Found[T] | Trouble:
        left_s = until - asyncio.get_running_loop().time()
        # aiohttp takes 0 for no limit, and rounds one of `ceil_threshold` or more up to a second.
        limit_s = max(_SHORTEST_S, min(self.timeout_s, left_s))
        timeout = aiohttp.ClientTimeout(total=limit_s, ceil_threshold=math.inf)
        try:
            async with session.post(
                self.url,
                json=body,
                proxy=_proxy(self.url),
                timeout=timeout,
                allow_redirects=False,  # a POST would become a GET
            ) as response:
                text = (await response.read()).decode(errors="replace")
                return self._read(response, text)
        except TimeoutError:
            return Trouble(f"no answer within {limit_s:.3g} s")
        except aiohttp.ClientError as error:
            return Trouble(f"{type(error).__name__}: {error}"[:_SHOWN])

    def _read(self, response: aiohttp.ClientResponse, text: str) -> _Found[T] | Trouble:
        status = response.status
        if status == 200:
            return _Found(self._answer_in(text))
        message = f"status {status}: {self._message_in(text)}"
        if status in _PASSES_BY_ITSELF:
            return Trouble(message, _retry_after_s(response.headers.get("Retry-After", "")))
        if 300 <= status < 400:
            message = f"status {status}, elsewhere: {response.headers.get('Location', '')!r:.80}"
        remedy = self.remedies.get(status, f"See {self.owner}.url")
        raise self.refused(f"{message}. {remedy}")

    def _answer_in(self, text: str) -> T:
        try:
            return self.read(json.loads(text))
        except NO_ANSWER as error:
            log.debug("%s: %r", self.url, error)
        shown = self._without_key(" ".join(text.split()))
        raise self.refused(
            f"status 200 with what is no {self.answers_with}: {shown!r:.{_SHOWN}}. See "
            f"{self.owner}.url"
        )

    def _message_in(self, text: str) -> str:
        """Returns the message of an error, without the key, which a server may repeat."""
        message = _error_message(text)
        return f"{self._without_key(' '.join(message.split())):.{_SHOWN}}"

    def _key(self) -> str | None:
        """Returns the key; None if the endpoint needs none."""
        return None if self.api_key_env is None else os.environ.get(self.api_key_env, "")

    def _without_key(self, text: str) -> str:
        key = self._key()
        return text.replace(key, "***") if key else text

    def _headers(self) -> dict[str, str]:
        key = self._key()
        if key is None:
            return {}
        if not key:
            raise self.error(
                f"{self.kind}_refused",
                f"the environment variable {self.api_key_env} ({self.owner}.api_key_env) is not "
                "set on this machine",
            )
        return {"Authorization": bearer(key)}

    def _warn_if_readable(self) -> None:
        address = urlsplit(self.url)
        if address.scheme == "http" and not stays_here(address.hostname or ""):
            log.warning(
                "%s.url is %s: anyone able to read that network sees the key. Use https if the "
                "endpoint has it.",
                self.owner,
                self.url,
            )

    @classmethod
    def address_of(cls, url: str) -> str:
        """Returns the address of the route.

        Raises:
            ConfigError: It is no such URL.
        """
        try:
            address = urlsplit(url)
            known = address.scheme in ("http", "https") and bool(address.hostname)
            known = known and not address.fragment
            has_port = address.port is None or address.port > 0  # raises ValueError for no number
        except (ValueError, TypeError, AttributeError):
            known = has_port = False
        if not known or not has_port or re.search(r"\s", url):
            example = f"https://host{cls.first_path}"
            raise ConfigError(
                f"{cls.owner}.url is {url!r:.80}: give http://host:port, or an address such as "
                f"{example}."
            )
        if address.username is not None or address.password is not None:
            raise ConfigError(
                f"{cls.owner}.url, of {address.hostname}, has a user or a password: put the key in "
                f"an environment variable, and its name in {cls.owner}.api_key_env."
            )
        path = address.path.rstrip("/")
        if not path.endswith(cls.route):
            path = (path or cls.first_path) + cls.route
        return urlunsplit((address.scheme, address.netloc, path, address.query, ""))

    def _check_key(self, name: str) -> None:
        """Raises ConfigError for no key. Nothing that may be a key itself is shown."""
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError(
                f"{self.owner}.api_key_env is no name of an environment variable (not shown: it "
                "may be the key itself). Set the key in a variable, and give its name, such as "
                f"{self.kind.upper()}_API_KEY."
            )
        key = os.environ.get(name)
        shown = name if name.isupper() else "(not shown: it may be the key itself)"
        if not key:
            raise ConfigError(
                f"{self.owner}.api_key_env names the environment variable {shown}, which is "
                f"{'not set' if key is None else 'empty'}: set it to the key, or leave api_key_env "
                "out."
            )
        if not re.fullmatch(r"[!-~]+", key):
            raise ConfigError(
                f"{self.owner}.api_key_env names the environment variable {shown}, whose value has "
                "white space, a line end or a letter that is not ASCII: set it to the key alone."
            )


def _error_message(text: str) -> str:
    """Returns the message in a body of OpenAI's form, else the whole text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for name in ("error", "message"):
        found = found.get(name, found) if isinstance(found, dict) else found
    return found if isinstance(found, str) else text


def _backoff_s(number: int) -> float:
    """Returns the seconds after a request: doubled each time, and a random share less, so that many
    do not come back at once."""
    doublings = min(number - 1, 30)  # more would not fit into a float
    return float(min(FIRST_WAIT_S * 2**doublings, LONGEST_WAIT_S) * random.uniform(0.5, 1.0))


def _retry_after_s(header: str) -> float:
    """Returns the seconds that a server asks to wait: a number, or a date; 0 if it does not say."""
    if re.fullmatch(r"\s*\d+(\.\d*)?\s*", header):
        return float(header)
    try:
        date = parsedate_to_datetime(header)
    except (ValueError, OverflowError):
        return 0.0
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


def _proxy(url: str) -> str | None:
    """Returns the proxy that the environment names for an address; a cluster's does not lead back
    to this machine."""
    address = urlsplit(url)
    host = address.hostname or ""
    if stays_here(host) or proxy_bypass(host):
        return None
    return getproxies().get(address.scheme)
