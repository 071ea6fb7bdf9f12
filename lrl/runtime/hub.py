"""The Hugging Face hub, if a run needs it.

Without a network its clients would try again for half a minute at each file.
"""

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
SWITCH = "HF_HUB_OFFLINE"


@cache
def reach() -> None:
    """Asks once whether the hub can be reached.

    If not, this process and its children take the models and data sets that are on this machine.
    """
    if constants.is_offline_mode():
        return
    server = urlsplit(constants.ENDPOINT)
    proxy = getproxies().get(server.scheme)
    if proxy and not proxy_bypass(server.hostname or ""):
        server = urlsplit(proxy)
    port = server.port or (80 if server.scheme == "http" else 443)
    try:
        socket.create_connection((server.hostname, port), CONNECT_S).close()
    except TimeoutError:
        return
    except OSError as error:
        constants.HF_HUB_OFFLINE = True
        os.environ[SWITCH] = "1"
        text = "%s cannot be reached (%s): only models and data sets on this machine are used."
        log.warning(text, server.hostname, error.strerror)


def offline() -> bool:
    """Tells whether only models and data sets on this machine are used."""
    return constants.is_offline_mode()
