"""The terminal view: what stands on the screen after events, and what a log file gets."""

import contextlib
import importlib.util
import io
import logging
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest

from undrift.experiment.events import RunInfo
from undrift.report.sparkline import ASCII, sparkline
from undrift.report.terminal import TerminalView, render
from undrift.report.terminal_screen import HIDE, SHOW
from undrift.report.terminal_state import (
    Style,
    ViewState,
    all_seconds_left,
    seconds_left,
    start_run,
    take_round,
)
from undrift.report.terminal_text import cells, clean, fit, without_escapes

ROOT = Path(__file__).parents[2]


def load_picture_script():
    spec = importlib.util.spec_from_file_location(
        "terminal_picture", ROOT / "docs" / "pictures" / "terminal.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


picture = load_picture_script()


class FakeTerminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True

    def fileno(self):
        raise OSError("not a file")


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    size(monkeypatch, 100, 20)


def size(monkeypatch, width, height):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", str(height))


def a_run(label="scaffold", seed=1, rounds=10, name="digits"):
    return RunInfo(name, label, seed, rounds, None, {})


def record(number, **more):
    return {
        "round": number,
        "test_accuracy": number / 20,
        "seconds": 0.5,
        "client_steps": 50,
    } | more


def screen_of(stream, width=100, height=20):
    screen = picture.Screen(width, height)
    screen.feed(stream.getvalue())
    return screen


def rows_of(stream, **size):
    return [row for row in screen_of(stream, **size).text() if row]


def play(view, run, rounds, clock=None, step=1.0, past=()):
    view.started(run, list(past))
    history = list(past)
    for number in range(len(past) + 1, rounds + 1):
        if clock is not None:
            clock.now += step
        history.append(record(number))
        view.round(run, history[-1])
    return history


# ---- the live block ------------------------------------------------------------------------------


def test_a_run_that_goes_on_has_one_line_with_everything_about_it():
    stream, clock = FakeTerminal(), Clock()
    view = TerminalView(stream, total=4, clock=clock)
    play(view, a_run(), 5, clock)
    header, line = rows_of(stream)
    assert header == "digits   0/4 runs   ETA 0:35   elapsed 0:05"
    assert re.fullmatch(
        r"  scaffold +seed 1  ━{8}─{8}   5/10  ETA 0:05  acc 25.0 %  100 steps/s  ▁▃▄▆█", line
    )


def test_the_block_is_redrawn_in_place():
    stream, clock = FakeTerminal(), Clock()
    view = TerminalView(stream, clock=clock)
    play(view, a_run(), 9, clock)
    assert len(rows_of(stream)) == 2


def test_a_finished_run_leaves_one_line_above_those_that_go_on():
    stream, clock = FakeTerminal(), Clock()
    view = TerminalView(stream, total=2, clock=clock)
    view.started(a_run("fedavg"), [])
    history = play(view, a_run(), 10, clock)
    history[6]["test_accuracy"] = 0.9
    view.finished(a_run(), history)
    done, header, active = rows_of(stream)
    assert re.fullmatch(
        r"✓ scaffold +seed 1  acc 50.0 %  best 50.0 % in round 10  10 rounds in 0:10", done
    )
    assert "1/2 runs" in header
    assert "fedavg" in active


def test_runs_that_interleave_each_keep_their_own_line():
    stream, clock = FakeTerminal(), Clock()
    view = TerminalView(stream, clock=clock)
    one, two = a_run(seed=1), a_run(seed=2)
    view.started(one, [])
    view.started(two, [])
    for number in range(1, 5):
        clock.now += 1
        view.round(one, record(number))
        view.round(two, record(number, test_accuracy=0.9))
    _, first, second = rows_of(stream)
    assert "seed 1" in first and "acc 20.0 %" in first
    assert "seed 2" in second and "acc 90.0 %" in second


def test_at_most_about_eight_pictures_a_second():
    stream, clock = FakeTerminal(), Clock()
    view = TerminalView(stream, clock=clock)
    play(view, a_run(rounds=1000), 1000, clock, step=0.001)
    pictures = stream.getvalue().count("\x1b[J")
    assert pictures <= 8 + 4


def test_events_that_come_together_are_all_seen():
    stream, clock = FakeTerminal(), Clock()
    view = TerminalView(stream, clock=clock)
    for seed in (1, 2):
        view.started(a_run(seed=seed), [])
    clock.now += 10
    for seed in (1, 2):
        view.round(a_run(seed=seed), record(1))
    assert all("1/10" in row for row in rows_of(stream)[1:])


def test_between_rounds_the_clock_can_be_let_go_on():
    stream, clock = FakeTerminal(), Clock()
    view = TerminalView(stream, clock=clock)
    view.started(a_run(), [])
    clock.now += 70
    view.refresh()
    assert "elapsed 1:10" in rows_of(stream)[0]


def test_without_an_accuracy_the_loss_is_shown():
    stream, clock = FakeTerminal(), Clock()
    view = TerminalView(stream, clock=clock)
    view.started(a_run(), [])
    clock.now += 1
    view.round(a_run(), {"round": 1, "test_loss": 0.43217})
    assert "loss 0.4322" in rows_of(stream)[1]


def test_a_round_without_a_test_keeps_the_last_accuracy():
    stream, clock = FakeTerminal(), Clock()
    view = TerminalView(stream, clock=clock)
    play(view, a_run(), 2, clock)
    clock.now += 1
    view.round(a_run(), {"round": 3, "train_loss": 1.0})
    assert "acc 10.0 %" in rows_of(stream)[1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308, -1e308])
def test_numbers_of_a_run_that_diverges_do_not_stop_it(value):
    stream, clock = FakeTerminal(), Clock()
    view = TerminalView(stream, clock=clock)
    view.started(a_run(), [])
    for number, loss in enumerate([1.0, value, value, 2.0], 1):
        clock.now += 1
        view.round(a_run(), {"round": number, "test_loss": loss, "seconds": 0, "client_steps": 5})
    view.finished(a_run(), [])
    view.close()
    assert "4 rounds" in rows_of(stream)[0]


def test_a_failed_run_says_why_in_one_line():
    stream = FakeTerminal()
    view = TerminalView(stream)
    play(view, a_run(), 3)
    view.failed(a_run(), ValueError("client 17:\nloss is \x1b[31mNaN"))
    (row,) = rows_of(stream)
    assert row.endswith("failed after round 3: ValueError: client 17: loss is NaN")


def test_several_runs_end_with_a_line_about_all_of_them():
    stream = FakeTerminal()
    view = TerminalView(stream, total=2)
    for seed in (1, 2):
        view.finished(a_run(seed=seed), play(view, a_run(seed=seed), 10))
    view.close()
    assert rows_of(stream)[-1].startswith("digits   2/2 runs   in 0:00")


def test_a_run_with_nothing_left_to_do_is_shown_from_its_history():
    stream = FakeTerminal()
    view = TerminalView(stream)
    view.finished(a_run(), [record(n) for n in range(1, 11)])
    assert "acc 50.0 %" in rows_of(stream)[0]


def test_a_run_that_was_complete_says_so():
    stream, log = FakeTerminal(), io.StringIO()
    past = [record(n) for n in range(1, 11)]
    for view in (TerminalView(stream), TerminalView(log, total=3)):
        view.started(a_run(), past)
        view.finished(a_run(), past)
    assert rows_of(stream)[0].endswith("10 rounds, done before")
    assert log.getvalue() == (
        "scaffold seed 1: finished, 10 rounds, done before, acc 50.0 %, "
        "best 50.0 % in round 10, 1 of 3 runs done\n"
    )


# ---- a clean terminal ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_failure_gives_the_cursor_back(error):
    stream = FakeTerminal()
    view = TerminalView(stream)
    play(view, a_run(), 3)
    assert not screen_of(stream).cursor_visible
    view.failed(a_run(), error)
    assert screen_of(stream).cursor_visible


def test_ctrl_c_gives_the_cursor_back_while_others_go_on():
    stream = FakeTerminal()
    view = TerminalView(stream)
    view.started(a_run(seed=2), [])
    play(view, a_run(), 3)
    view.failed(a_run(), KeyboardInterrupt())
    (row,) = rows_of(stream)
    assert row.endswith("seed 1  stopped after round 3")
    assert screen_of(stream).cursor_visible


def test_close_takes_the_block_away_and_gives_the_cursor_back():
    stream = FakeTerminal()
    with TerminalView(stream) as view:
        play(view, a_run(), 3)
    (row,) = rows_of(stream)
    assert row.endswith("seed 1  stopped after round 3")
    assert screen_of(stream).cursor_visible
    view.close()  # a second time does no harm


def test_an_exception_that_nobody_tells_the_view_gives_the_cursor_back():
    program = (
        "import sys; from undrift.report.terminal import TerminalView\n"
        "from undrift.experiment.events import RunInfo\n"
        "TerminalView(sys.stdout).started(RunInfo('e', 'l', 1, 5, None, {}), [])\n"
        "raise SystemExit(3)\n"
    )
    leader, follower = pty.openpty()
    ended = subprocess.run([sys.executable, "-c", program], stdout=follower, check=False)
    shown = drain(leader)
    os.close(follower)
    os.close(leader)
    assert ended.returncode == 3
    assert shown.count(HIDE) == 1
    assert shown.rindex(SHOW) > shown.rindex(HIDE)


def test_a_real_terminal_is_followed_when_its_size_changes():
    leader, follower = pty.openpty()
    set_size(follower, 90, 12)
    with open(follower, "w", encoding="utf-8") as stream:
        clock = Clock()
        view = TerminalView(stream, clock=clock)
        play(view, a_run(), 3, clock)
        wide = drain(leader)
        set_size(follower, 40, 12)
        clock.now += 1
        view.round(a_run(), record(4))
        narrow = drain(leader)
        view.close()
    os.close(leader)
    assert max(map(cells, lines_in(wide))) > 60
    assert 0 < max(map(cells, lines_in(narrow))) < 40
    assert "\x1b[4A" in narrow  # of three lines, the last now takes three rows


def drain(terminal):
    text = b""
    while select.select([terminal], [], [], 0)[0]:
        text += os.read(terminal, 4096)
    return text.decode()


def set_size(terminal, width, height):
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))


def lines_in(text):
    return re.split(r"[\r\n]+", without_escapes(text))


# ---- the size of what is drawn -------------------------------------------------------------------

LABELS = [
    "fedavg",
    "精度の高い実験" * 5,
    "e\u0301" * 40,
    "👩‍🔬 lab ✌️",
    "a\x1b[2J\x1b]0;hijacked\x07b\x9b31m\u202e\r\nc",
    "",
]


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("width", [1, 7, 20, 33, 60, 80, 100, 240])
@pytest.mark.parametrize("colour", [False, True])
def test_no_line_is_wider_than_the_terminal(label, width, colour):
    state = ViewState(total=9, style=Style(colour))
    for seed in range(4):
        view = start_run(state, a_run(label, seed, rounds=5000), [])
        state.now += 1
        take_round(state, view, record(4321, client_steps=10**9))
    for line in render(state, width, 24):
        assert cells(without_escapes(line)) < max(2, width)


@pytest.mark.parametrize("height", [1, 2, 3, 5, 8, 24])
def test_there_are_never_more_lines_than_the_terminal_has(height):
    state = ViewState()
    for seed in range(12):
        start_run(state, a_run(seed=seed), [])
    lines = render(state, 80, height)
    assert 1 <= len(lines) <= max(1, height - 1)
    if 3 < height < 13:
        assert lines[-1] == f"  and {12 - (height - 3)} more runs"


def test_a_label_cannot_steer_the_terminal():
    stream = FakeTerminal()
    view = TerminalView(stream)
    run = a_run("a\x1b[2J\x1b]0;title\x07b\x9b31m\u202e\r\nc", name="x\x1b[5A")
    view.finished(run, play(view, run, 2))
    view.failed(run, ValueError("\x1b[2J"))
    view.close()
    orders = set(
        re.findall(
            r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x09\x0b-\x0c\x0e-\x1a\x7f-\x9f]", stream.getvalue()
        )
    )
    assert not orders & {"\x1b[2J", "\x1b[5A", "\x07", "\x9b"}
    assert "ab c" in rows_of(stream)[0]


def test_lines_of_one_block_are_aligned():
    state = ViewState()
    for label, seed in [("fedavg", 1), ("精度", 10)]:
        view = start_run(state, a_run(label, seed), [])
        state.now += 1
        take_round(state, view, record(7))
    lines = render(state, 80, 24)[-2:]
    assert len({cells(line[: line.index("/10")]) for line in lines}) == 1


def test_colours_are_left_out_where_they_are_not_wanted(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = FakeTerminal()
    play(TerminalView(stream), a_run(), 3)
    assert not re.search(r"\x1b\[[0-9;]*m", stream.getvalue())


def test_a_terminal_without_unicode_gets_ascii():
    stream, clock = FakeTerminal(), Clock()
    stream.encoding = "latin-1"
    view = TerminalView(stream, clock=clock)
    run = a_run("精度")
    view.finished(run, play(view, run, 10, clock))
    view.close()
    assert stream.getvalue().isascii()
    assert "#" in stream.getvalue()


# ---- estimates -----------------------------------------------------------------------------------


def test_an_estimate_counts_only_rounds_measured_here():
    state = ViewState()
    view = start_run(state, a_run(rounds=100), [record(n) for n in range(1, 41)])
    assert seconds_left(view, state.now) is None
    state.now = 2.0
    take_round(state, view, {"round": 41})
    assert seconds_left(view, state.now) == 2.0 * 59


def test_start_up_is_left_out_of_the_estimate():
    state = ViewState()
    view = start_run(state, a_run(rounds=10), [])
    for number, now in enumerate([30.0, 31.0, 32.0], 1):
        state.now = now
        take_round(state, view, record(number))
        assert seconds_left(view, now) == (4.5 if number == 1 else 10.0 - number)


def test_the_estimate_for_all_runs_divides_what_goes_on_side_by_side():
    state = ViewState(total=6)
    for seed in (1, 2):
        view = start_run(state, a_run(seed=seed, rounds=10), [])
        for number in (1, 2):
            state.now += 1
            take_round(state, view, record(number))
    each_left = 8 * 1.0
    assert all_seconds_left(state) == pytest.approx((2 * each_left - 2 + 4 * 10) / 2)


def test_there_is_no_estimate_without_a_total_or_a_round():
    state = ViewState()
    view = start_run(state, a_run(), [])
    assert all_seconds_left(state) is None
    take_round(state, view, record(1))
    assert all_seconds_left(state) is None


# ---- no terminal ---------------------------------------------------------------------------------


def test_a_log_file_gets_a_line_per_tenth_and_no_escapes():
    stream, clock = io.StringIO(), Clock()
    view = TerminalView(stream, total=1, clock=clock)
    run = a_run(rounds=200)
    view.finished(run, play(view, run, 200, clock, step=0.1))
    view.close()
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert len(lines) == 1 + 9 + 1
    assert lines[0] == "scaffold seed 1: starts, 200 rounds"
    assert lines[1].startswith(
        "scaffold seed 1: round 20/200 (10 %), acc 100.0 %, 100 steps/s, ETA"
    )
    assert lines[-1].startswith("scaffold seed 1: finished, 200 rounds in 0:20, acc")


def test_a_slow_run_gets_a_line_every_half_minute():
    stream, clock = io.StringIO(), Clock()
    play(TerminalView(stream, clock=clock), a_run(rounds=1000), 6, clock, step=16.0)
    assert len(stream.getvalue().splitlines()) == 1 + 3


def test_a_resumed_run_says_where_it_goes_on():
    stream = io.StringIO()
    TerminalView(stream).started(a_run(rounds=90), [record(n) for n in range(1, 41)])
    assert stream.getvalue() == "scaffold seed 1: resumes after round 40 of 90\n"


def test_a_failed_run_is_a_line():
    stream = io.StringIO()
    view = TerminalView(stream)
    play(view, a_run(), 2)
    view.failed(a_run(), ValueError("two\nlines"))
    assert (
        stream.getvalue().splitlines()[-1].endswith("failed after round 2: ValueError: two lines")
    )


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = FakeTerminal()
    play(TerminalView(stream), a_run(), 3)
    assert "\x1b" not in stream.getvalue()


def test_a_reader_that_leaves_does_not_stop_training():
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    view = TerminalView(stream)
    view.finished(a_run(), play(view, a_run(), 10))
    view.close()
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def test_a_closed_stream_does_not_stop_training():
    stream = FakeTerminal()
    view = TerminalView(stream)
    stream.close()
    view.finished(a_run(), play(view, a_run(), 10))
    view.close()


# ---- messages ------------------------------------------------------------------------------------


def test_a_warning_goes_above_the_block(monkeypatch):
    logger = logging.getLogger("undrift")
    monkeypatch.setattr(logger, "propagate", False)
    stream, clock = FakeTerminal(), Clock()
    view = TerminalView(stream, clock=clock)
    play(view, a_run(), 3, clock)
    logger.warning("the disk is full")
    assert rows_of(stream)[0] == "warning: the disk is full"
    assert len(rows_of(stream)) == 3
    view.close()
    assert logger.handlers == []


# ---- the parts -----------------------------------------------------------------------------------


def test_a_sparkline_shows_the_course_in_few_characters():
    assert sparkline([], 8) == ""
    assert sparkline([0.5, 0.5], 8) == "▄▄"
    assert sparkline(list(range(1000)), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([float("nan"), 0, 1], 8, ASCII) == "_#"
    assert sparkline([1.0], 0) == ""


@pytest.mark.parametrize("text", LABELS)
def test_cleaning_twice_changes_nothing_more(text):
    assert clean(clean(text)) == clean(text)
    assert all(cells(fit(clean(text), width)) <= width for width in range(12))


def test_a_picture_of_a_screen_is_always_the_same():
    screen = picture.Screen(30, 3)
    screen.feed("\x1b[1mbold\x1b[0m  \x1b[36m━━\x1b[2m──\x1b[0m ▁█ <&>\r\n")
    svg = picture.draw(screen.rows)
    assert svg == picture.draw(screen.rows)
    assert "&lt;&amp;&gt;" in svg
    assert svg.count("<rect") == 1 + 4 + 2
