"""What a launcher makes of the reports of its driver, and of what Ray writes between them. The driver
is a program of the test: no Ray is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lrl.members.launchers import Ray, ray
from tests.leftovers import wait_for

DEADLINE_S = 20.0
Driver = Callable[[str], ray._Driver]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Makes a driver that writes a text, and ends with its standard input."""
    made: list[ray._Driver] = []

    def make(text: str) -> ray._Driver:
        program = tmp_path / "driver.py"
        lines = [
            "import sys",
            f"sys.stdout.write({text!r})",
            "sys.stdout.flush()",
            "sys.stdin.read()",
        ]
        program.write_text("\n".join(lines))
        monkeypatch.setattr(ray, "DRIVER", program)
        made.append(ray._Driver([]))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    "text",
    [
        "{'CPU': 1.0}",
        '{"CPU": 1.0}',
        "[1]",
        '{"ended": "a job that nobody has started", "said": ""}',
        '{"nodes": "many"}',
    ],
)
def test_a_line_of_rays_that_begins_as_a_report_does_ends_no_connection(
    driver: Driver, text: str
) -> None:
    """The thread that reads ended: of no job the end was seen any more."""
    found = driver(f'{text}\n\n{{"nodes": 2}}\n{text}\n\n{{"waits": "a place"}}\n')
    assert found.connected.wait(DEADLINE_S) and found.nodes == 2
    wait_for(lambda: found.waits == "a place", DEADLINE_S, "the second report")
    assert found.last_words() == f"{text}\n{text}"


def test_a_task_is_stopped_also_when_its_driver_is_closed(driver: Driver) -> None:
    found = driver('\n{"nodes": 1}\n')
    task = found.start("scorer-0", ["join"], {})
    found.close()
    task._ended.clear()  # the thread that reads has not seen the end yet
    task._ended.wait = lambda seconds: True  # type: ignore[method-assign]
    task.stop()
    assert not found.alive, "the order that could not be sent has raised nothing"


def test_a_job_does_not_wait_for_ever_while_another_one_connects(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As many jobs as there were waited one after the other for a head that was lost."""
    begun, over = threading.Event(), threading.Event()

    def connect(launcher: Ray) -> ray._Driver:
        begun.set()
        over.wait(DEADLINE_S)
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(Ray, "_connect", connect)
    monkeypatch.setattr(ray, "CONNECT_S", 0.1)
    launcher = Ray(2)
    failed: list[OSError] = []

    def start() -> None:
        try:
            launcher.start("scorer-0", [], {}, tmp_path)
        except OSError as error:
            failed.append(error)

    first = threading.Thread(target=start)
    first.start()
    assert begun.wait(DEADLINE_S)
    with pytest.raises(ConnectionError, match="has not answered another job"):
        launcher.start("scorer-1", [], {}, tmp_path)
    over.set()
    first.join(DEADLINE_S)
    assert [str(error) for error in failed] == ["nobody answers"]
    with pytest.raises(ConnectionError, match="nobody answers"):
        launcher.start("scorer-1", [], {}, tmp_path)
