"""Rewards that misbehave on request: the response says how. In a module without torch, as reward workers import it."""

import asyncio
import ctypes
import os
import re
import sys
import time


def obey(prompt, response, **columns):
    order, _, value = response.partition(" ")
    match order:
        case "give":
            return float(value)
        case "sleep":
            time.sleep(float(value))
            return 1.0
        case "loop":
            return float(re.match(r"(a+)+$", "a" * 64 + "b") is not None)  # never ends, and holds Python's lock
        case "exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "sysexit":
            sys.exit(1)
        case "raise":
            raise LookupError(value)
        case "bool":
            return True
        case "text":
            return "1.0"
        case "nothing":
            return None
        case "empty":
            return {}
        case "parts":
            return {"form": 0.25, "sense": 0.5}
        case "badpart":
            return {"form": 0.25, "sense": float("nan")}
        case "pid":
            return os.getpid()


async def obey_later(prompt, response, **columns):
    order, _, value = response.partition(" ")
    if order == "wait":
        await asyncio.sleep(float(value))
    return 1.0


def length(prompt, response, *, num_tokens, finish_reason, **columns):
    return num_tokens if finish_reason == "stop" else -num_tokens


def level(prompt, response, *, level, **columns):
    return level


def no_columns(prompt, response):
    return 1.0


def torch_is_loaded(prompt, response, **columns):
    return float("torch" in sys.modules)
