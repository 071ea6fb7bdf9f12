"""The cause of a generator's end, in ends of real vLLM logs with shortened paths."""

from __future__ import annotations

import pytest

from lrl.generators.log_cause import cause

NO_MEMORY = """\
(EngineCore pid=82) ERROR 11-23 02:35:22 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=82) ERROR 11-23 02:35:22 [core.py:1510]   File "core.py", line 1482, in run_engine_core
(EngineCore pid=82) ERROR 11-23 02:35:22 [core.py:1510]     raise ValueError(
(EngineCore pid=82) ERROR 11-23 02:35:22 [core.py:1510] ValueError: No available memory for the cache blocks.
Process EngineCore:
Traceback (most recent call last):
  File "core.py", line 1514, in run_engine_core
    raise e
ValueError: No available memory for the cache blocks.
Traceback (most recent call last):
  File "utils.py", line 1431, in wait_for_engine_startup
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
2026-11-23 02:35:37,917 supervisor: EXITED after exit status 1; ending []
"""
TOO_LONG = """\
(APIServer pid=77) INFO 11-23 02:33:01 [utils.py:9] Error handling is on: see Exception hooks
Traceback (most recent call last):
  File "_dataclasses.py", line 121, in __init__
    s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (100000) is greater than 2048. [type=value_error, input_value=ArgsKwargs(()]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
2026-11-23 02:33:07,858 supervisor: EXITED after exit status 1; ending []
"""
WRONG_FLAG = """\
                     [--enable-log-requests | --no-enable-log-requests]
                     [model_tag]
api_server.py: error: unrecognized arguments: --no-such-flag
2026-11-23 02:33:51,540 supervisor: EXITED after exit status 2; ending []
"""
NO_DEVICE = """\
  File "device.py", line 59, in __post_init__
    raise RuntimeError(
RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG` to see more.
2026-11-26 02:33:51,540 supervisor: EXITED after exit status 1; ending []
"""
KILLED = """\
(APIServer pid=77) INFO 11-23 02:33:01 [utils.py:9] loading weights
2026-11-23 02:33:51,540 supervisor: EXITED after signal 9; ending []
"""


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (NO_MEMORY, "ValueError: No available memory for the cache blocks."),
        (
            TOO_LONG,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig "
            "Value error, User-specified max_model_len (100000) is greater than 2048.",
        ),
        (WRONG_FLAG, "api_server.py: error: unrecognized arguments: --no-such-flag"),
        (
            NO_DEVICE,
            "RuntimeError: Failed to infer device type, please set the environment variable "
            "`VLLM_LOGGING_LEVEL=DEBUG` to see more.\nvLLM's build and this machine do not fit, "
            "or its driver does not answer. Type: lrl doctor",
        ),
        (KILLED, ""),
        ("", ""),
    ],
)
def test_the_cause_of_an_end_is_the_last_error_that_names_no_other_error(
    log: str, found: str
) -> None:
    assert cause(log) == found
