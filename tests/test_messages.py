"""Warnings point at the user's line, and log lines follow the user's configuration."""

import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import hdet
from hdet import _messages

HERE = str(Path(__file__))


class BareRoot(logging.RootLogger):
    """A root logger that refuses the handlers that pytest adds. Tests append theirs to its list."""

    def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802
        pass


class Collector(logging.Handler):
    """A handler of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The logger of hdet in a process where no logging is configured."""
    root = BareRoot(logging.WARNING)
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(_messages.LOGGER, "parent", root)
    monkeypatch.setattr(_messages.LOGGER, "handlers", [])
    _messages.LOGGER.setLevel(logging.NOTSET)
    yield _messages.LOGGER
    _messages.LOGGER.setLevel(logging.NOTSET)


@contextmanager
def expected_line(offset: int) -> Iterator[None]:
    """Expect one warning that points at the line `offset` lines below the caller of this."""
    line = sys._getframe(2).f_lineno + offset
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    assert [(one.filename, one.lineno) for one in seen] == [(HERE, line)]


def as_module(name: str, source: str) -> dict[str, Any]:
    """The names that this source defines, as if it were the module `name`."""
    names: dict[str, Any] = {"__name__": name}
    exec(compile(source, f"{name}.py", "exec"), names)
    return names


def schedule() -> LRScheduler:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    optimizer.step()
    return LambdaLR(optimizer, lambda _: 1.0)


# Warnings ---------------------------------------------------------------------------------------


def test_warning_points_at_the_caller() -> None:
    with expected_line(1):
        _messages.warn("a text")


def test_warning_skips_all_frames_of_hdet_torch_and_contextlib() -> None:
    inner = as_module("hdet.inner", "def call(function, text):\n    function(text)\n")["call"]
    middle = as_module("torch.optim.middle", "def call(*args):\n    args[0](*args[1:])\n")["call"]
    outer = as_module("hdet", "def call(*args):\n    args[0](*args[1:])\n")["call"]
    with expected_line(1):
        outer(middle, outer, inner, _messages.warn, "a text")


def test_warning_without_a_user_frame_does_not_fail() -> None:
    code = "import hdet._messages; hdet._messages.warn('a text')"
    done = subprocess.run(
        [sys.executable, "-c", f"exec(compile({code!r}, 'x', 'exec'), {{'__name__': 'hdet'}})"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "UserWarning: a text" in done.stderr


def test_warning_of_a_constructor_points_at_the_users_line() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with expected_line(1):
        hdet.HDET(optimizer, model=model)  # of unknown length, so without a scout


def test_warning_of_a_model_that_never_came_points_at_the_first_step() -> None:
    base = schedule()
    scheduler = hdet.HDET(base, total_steps=4000)
    base.optimizer.step()
    with expected_line(1):
        scheduler.step(1.0)


def test_warning_behind_torchs_wrapper_of_step_points_at_the_users_line() -> None:
    source = (
        "from torch.optim.lr_scheduler import LRScheduler\n"
        "from hdet._messages import warn\n"
        "class Warns(LRScheduler):\n"
        "    def get_lr(self):\n"
        "        if self.last_epoch > 0:\n"
        "            warn('a text')\n"
        "        return [0.1]\n"
    )
    warns: Any = as_module("hdet.scheduler.example", source)["Warns"]
    made: LRScheduler = warns(schedule().optimizer)
    made.optimizer.step()
    with expected_line(1):
        made.step()


def test_category_of_a_warning_is_kept() -> None:
    with pytest.warns(DeprecationWarning, match="a text"):
        _messages.warn("a text", DeprecationWarning)


# Log lines --------------------------------------------------------------------------------------


def test_import_does_not_configure_logging() -> None:
    code = (
        "import logging, hdet; hdet.HDET\n"
        "logger = logging.getLogger('hdet')\n"
        "assert logger.level == logging.NOTSET and not logger.handlers\n"
        "assert not logging.getLogger().handlers\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_line_is_visible_by_default(
    unconfigured: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    _messages.info("scout chose 0.1\n  after 36 steps.")
    assert capsys.readouterr().err == "hdet: scout chose 0.1 after 36 steps.\n"


def test_level_of_the_user_is_kept(
    unconfigured: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    unconfigured.setLevel(logging.ERROR)
    _messages.info("a line")
    assert not unconfigured.handlers
    assert unconfigured.level == logging.ERROR
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["hdet", None])
def test_line_goes_to_the_handler_of_the_user_that_shows_it(
    unconfigured: logging.Logger, capsys: pytest.CaptureFixture[str], name: str | None
) -> None:
    handler = Collector()
    logging.getLogger(name).handlers.append(handler)
    unconfigured.setLevel(logging.INFO)
    _messages.info("a line")
    assert handler.lines == ["a line"]
    assert capsys.readouterr().err == ""


def test_root_logger_at_warning_does_not_hide_the_line(
    unconfigured: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """`logging.basicConfig()` and `logging.warning(...)` leave the root logger at WARNING."""
    handler = Collector()
    logging.getLogger().handlers.append(handler)
    _messages.info("a line")
    assert handler.lines == []
    assert capsys.readouterr().err == "hdet: a line\n"


def test_root_logger_at_info_shows_the_line_once(
    unconfigured: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    _messages.info("a line")
    logging.getLogger().handlers.append(logging.StreamHandler(sys.stderr))
    logging.getLogger().setLevel(logging.INFO)
    _messages.info("another line")
    assert capsys.readouterr().err == "hdet: a line\nanother line\n"


# set_verbosity ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["WARNING", "warning", logging.WARNING])
def test_set_verbosity_hides_lines(
    unconfigured: logging.Logger, capsys: pytest.CaptureFixture[str], level: int | str
) -> None:
    hdet.set_verbosity(level)
    _messages.info("a line")
    assert capsys.readouterr().err == ""


def test_set_verbosity_shows_lines_without_other_configuration(
    unconfigured: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    hdet.set_verbosity("WARNING")
    hdet.set_verbosity("INFO")
    _messages.info("a line")
    assert capsys.readouterr().err == "hdet: a line\n"


def test_set_verbosity_refuses_other_values() -> None:
    with pytest.raises(ValueError, match=r"`level` must be one of .*INFO.*, got 'loud'"):
        hdet.set_verbosity("loud")
    with pytest.raises(TypeError, match=r"`level` must be a logging level .*, got True"):
        hdet.set_verbosity(True)
    with pytest.raises(ValueError, match=r"`level` must be one of .*, got -5"):
        hdet.set_verbosity(-5)
