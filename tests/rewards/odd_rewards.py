"""Rewards that misbehave as the response says. Reward workers import this module, so it must not
import torch."""

import asyncio
import ctypes
import mmap
import os
import re
import signal
import sys
import time
from pathlib import Path

hoard = []


class Unsayable(Exception):
    def __str__(self):
        raise ValueError("no words")


GIVEN = {
    "text": "1.0",
    "nothing": None,
    "list": [1.0, 0.0],
    "tuple": (1.0,),
    "huge": 10**400,
    "numbered": {1: 0.25},
    "empty": {},
    "parts": {"form": 0.25, "sense": 0.5},
    "badpart": {"form": 0.25, "sense": float("nan")},
}
RAISED = {
    "sysexit": SystemExit(1),
    "unsayable": Unsayable(),
    "cancel": asyncio.CancelledError(),
    "interrupt": KeyboardInterrupt(),
}


def obey(prompt, response, **columns):
    order, _, value = response.partition(" ")
    if order in GIVEN:
        return GIVEN[order]
    if order in RAISED:
        raise RAISED[order]
    match order:
        case "give":
            return float(value)
        case "sleep":
            time.sleep(float(value))
            return 1.0
        case "loop":
            # Never ends, and holds Python's lock.
            return float(re.match(r"(a+)+$", "a" * 64 + "b") is not None)
        case "deaf":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            while True:
                pass
        case "exit":
            os._exit(int(value or 3))
        case "hog":
            while True:
                # stays: the next response would find no memory in this worker.
                hoard.append(bytes(2**24))
        case "take":
            return float(len(bytes(int(float(value) * 2**30))) > 0)
        case "reserve":
            size = int(float(value) * 2**30)
            return float(len(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)) > 0)
        case "once":
            marker, _, rest = value.partition(" ")
            try:
                Path(marker).touch(exist_ok=False)
            except FileExistsError:
                return 1.0
            return obey(prompt, rest)
        case "segfault":
            ctypes.string_at(0)
        case "raise":
            raise LookupError(value)
        case "pid":
            return os.getpid()


async def obey_later(prompt, response, **columns):
    order, _, value = response.partition(" ")
    if order == "wait":
        await asyncio.sleep(float(value))
        return 1.0
    return obey(prompt, response)


def first_answer(prompt, response, *, answers, **columns):
    """Changes its column."""
    return float(answers.pop(0) == response)


async def one_later(prompt="", response="", **columns):
    await asyncio.sleep(0)
    return 1.0


def run_a_loop(prompt, response, **columns):
    return asyncio.run(one_later())


def trl_reward(completions, answer, **kwargs):
    return [float(len(completion)) for completion in completions]


def swapped(response, prompt, **columns):
    return 1.0


def length(prompt, response, *, num_tokens, finish_reason, **columns):
    return num_tokens if finish_reason == "stop" else -num_tokens


def missing(prompt, response, **columns):
    return columns["difficulty"]


def level(prompt, response, *, level, **columns):
    return level


def no_columns(prompt, response):
    return 1.0


def torch_is_loaded(prompt, response, **columns):
    return float("torch" in sys.modules)
