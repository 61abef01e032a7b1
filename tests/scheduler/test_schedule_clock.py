"""The clock that moves the user's schedule, before and after a search."""

from hypothesis import given
from hypothesis import strategies as st

from hdet.scheduler.schedule_clock import ScheduleClock


@given(st.integers(0, 90), st.integers(91, 400))
def test_schedule_clock_ends_with_the_run_after_a_search(scouted: int, total: int) -> None:
    clock = ScheduleClock(0, total)
    clock.scouted(scouted)
    moves = [clock.due(step) for step in range(scouted + 1, total + 1)]
    assert sum(moves) == total
    assert min(moves) >= 1
    assert max(moves) - min(moves) <= 1
