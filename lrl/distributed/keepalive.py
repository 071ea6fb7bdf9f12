"""Detection of machines that vanish: the kernel closes a connection whose other end is silent.

A process that ends closes its connections, and the other end knows at once. A machine that loses
its power or its network closes nothing: a wait for it would last until its timeout.
"""

import os
import socket

import psutil

PROBES = 4
"""Probes without an answer that close a connection."""


def close_silent_connections(silence_s: float) -> None:
    """Has the kernel close each TCP connection that this process now has, if its other end is
    silent for `silence_s`.

    The kernel of the other machine answers the probes, so a process may be busy as long as it
    likes. One that is stopped (SIGSTOP) counts as silent when it has not read for so long what was
    sent to it.
    """
    pause = max(1, round(silence_s / (PROBES + 1)))
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status != psutil.CONN_ESTABLISHED:
            continue
        # The same connection, whose owner is a library.
        with socket.socket(fileno=os.dup(connection.fd)) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
            # For what was sent.
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silence_s * 1000))
