"""The Hugging Face hub. Without a network its clients would try for half a minute at each file."""

import logging
import os
import socket
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""Seconds for a connection. A hub that answers later is left to the clients, which try again."""


@cache
def reach() -> bool:
    """Returns whether the hub can be reached, which is tried once; if not, this process and its
    children take what is on this machine."""
    if constants.is_offline_mode():
        return False
    server = urlsplit(constants.ENDPOINT)
    proxy = getproxies().get(server.scheme)
    if proxy and not proxy_bypass(server.hostname or ""):
        server = urlsplit(proxy)
    port = server.port or (80 if server.scheme == "http" else 443)
    try:
        socket.create_connection((server.hostname, port), CONNECT_S).close()
    except TimeoutError:
        return True
    except OSError as error:
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"
        text = "%s cannot be reached (%s): only models and data sets on this machine are used."
        log.warning(text, server.hostname, error.strerror)
        return False
    return True
