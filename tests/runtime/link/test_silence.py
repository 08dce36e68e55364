"""An engine's silence: what is taken for one that hangs, and what is not."""

from __future__ import annotations

from niwaki.runtime.link.engine_client import ALIVE_SECONDS
from niwaki.runtime.link.engine_process import HANGING_SECONDS, WATCH_SECONDS
from niwaki.runtime.link.silence import Silence


class Watched:
    """A silence that is looked at every WATCH_SECONDS, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.silence = Silence(lambda: self.now)

    def look(self, seconds: float) -> float:
        """For so long; what is seen at the end."""
        for _ in range(round(seconds / WATCH_SECONDS)):
            self.now += WATCH_SECONDS
            seen = self.silence.seconds()
        return seen


def test_an_engine_that_is_heard_no_more_hangs() -> None:
    watched = Watched()
    assert watched.look(50) == 50
    watched.silence.end()
    assert watched.look(3) == 3


def test_time_in_which_all_stood_still_is_no_silence_of_the_engine() -> None:
    watched = Watched()
    watched.look(2)
    watched.now += 90  # a paused container
    assert watched.silence.seconds() == 0
    assert watched.silence.seconds() == 0, "whoever looks next sees the same"
    assert watched.look(1) == 1 < ALIVE_SECONDS
    watched.silence.end()
    assert watched.look(0.5) == 0.5


def test_an_engine_that_did_not_go_on_with_us_hangs() -> None:
    watched = Watched()
    watched.now += 90
    assert watched.look(HANGING_SECONDS + 1) > HANGING_SECONDS


def test_a_look_that_comes_late_is_no_pause() -> None:
    watched = Watched()
    watched.now += 3
    assert watched.look(1) == 4
