"""A model behind an HTTP endpoint: its address, its key, and what an answer and a failure are.

`model_request` sends the requests.
"""

import json
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar
from urllib.parse import urlsplit, urlunsplit

from lrl.errors import ConfigError, CountedError, LrlError, TeacherError
from lrl.system.config_errors import above, at_least
from lrl.system.endpoint import stays_here

if TYPE_CHECKING:
    from lrl.rewards.model_request import Unanswered

log = logging.getLogger(__name__)

T = TypeVar("T")
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
_SHOWN = 160


class ModelEndpoint(ABC, Generic[T]):
    """Asks a model behind an endpoint, again where that may help. A subclass reads the answer.

    Args:
        url: `http://host:port`, `https://host/path`, or the whole address of the route.
        api_key_env: Name of the environment variable with the key; None for no key. The key itself
            is read at each answer, and never stored or sent to another process.
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

    @abstractmethod
    def read(self, found: Any) -> T:
        """Returns the answer in the JSON of a response; raises an error of reading if there is
        none."""

    async def before_request(self, number: int) -> None:
        """Called before each request of an answer with its number, from 1."""

    async def answer(self, body: dict[str, Any]) -> T:
        """Returns the answer to a request.

        Args:
            body: The request's JSON.

        Raises:
            LrlError: An `error` of kind `<kind>_refused`, or of kind `<kind>_failed` after all
                requests.
        """
        from lrl.rewards.model_request import Unanswered, post  # see there

        try:
            text = await post(
                self.url,
                body,
                self._key(),
                timeout_s=self.timeout_s,
                retries=self.retries,
                deadline_s=self.deadline_s,
                before_request=self.before_request,
            )
        except Unanswered as unanswered:
            raise self._error_of(unanswered) from None
        try:
            return self.read(json.loads(text))
        except _UNREADABLE as error:
            raise self.refused(
                f"status 200 with what is no {self.answers_with}: {self._shown(text)!r}. See "
                f"{self.owner}.url"
            ) from error

    def refused(self, message: str) -> LrlError:
        """Returns the error of a request that would be refused again."""
        return self.error(f"{self.kind}_refused", f"{self.url}: {message}")

    def _error_of(self, unanswered: "Unanswered") -> LrlError:
        reason = self._shown(unanswered.reason)
        if unanswered.refused:
            remedy = self.remedies.get(unanswered.status or 0, f"See {self.owner}.url")
            return self.refused(f"{reason}. {remedy}")
        return self.error(
            f"{self.kind}_failed",
            f"{self.url}: {reason}. No answer to {unanswered.requests} requests "
            f"({self.owner}.retries is {self.retries}) within {self.owner}.deadline_s "
            f"({self.deadline_s:g})",
        )

    def _shown(self, text: str) -> str:
        """Returns the beginning of a server's text, without the key, which it may repeat."""
        key = self._key()
        text = " ".join(text.split())
        return (text.replace(key, "***") if key else text)[:_SHOWN]

    def _key(self) -> str | None:
        """Returns the key; None if the endpoint needs none."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise self.refused(
                f"the environment variable {self.api_key_env} ({self.owner}.api_key_env) is not "
                "set on this machine"
            )
        return key

    def _check_key(self, name: str) -> None:
        """Raises ConfigError for no key, and warns of one that others can read."""
        if not os.environ.get(name, "").strip():
            shown = (
                name if re.fullmatch(r"[A-Z_][A-Z0-9_]*", name) else "(it may be the key itself)"
            )
            raise ConfigError(
                f"{self.owner}.api_key_env names an environment variable {shown}, which is not set: "
                f"set it to the key, and give its name, such as {self.kind.upper()}_API_KEY."
            )
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
            ConfigError: It is no such URL, or has a password.
        """
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigError(f"{cls.owner}.url is {url!r:.80}: give http://host:port.")
        if address.password is not None or address.username is not None:
            raise ConfigError(
                f"{cls.owner}.url has a user or a password in it (not shown): give the key in "
                f"the environment variable that {cls.owner}.api_key_env names."
            )
        path = address.path.rstrip("/")
        if not path.endswith(cls.route):
            path = (path or cls.first_path) + cls.route
        return urlunsplit((address.scheme, address.netloc, path, address.query, ""))
