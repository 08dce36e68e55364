"""The inbox of the engine's thread: order, what is gathered, and its end."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest

from niwaki.runtime.api import EngineStopped
from niwaki.runtime.host.inbox import MOST_GATHERED, Command, Inbox


def commands(count: int) -> list[Command]:
    return [lambda: None for _ in range(count)]


def taken(inbox: Inbox) -> list[Command]:
    """What is there now."""
    return inbox.take(None)[0]


def test_commands_are_taken_in_order_and_once() -> None:
    inbox, (first, second) = Inbox(), commands(2)
    inbox.post(first)
    inbox.post(second)
    assert inbox.take(nullcontext()) == ([first, second], False)
    assert taken(inbox) == []


def test_what_is_posted_together_comes_together() -> None:
    inbox, (first, second, after) = Inbox(), commands(3)
    with inbox.together():
        inbox.post(first)
        inbox.post(second)
        assert taken(inbox) == []
    assert taken(inbox) == [first, second]
    inbox.post(after)
    assert taken(inbox) == [after]


def test_many_do_not_wait_for_all() -> None:
    inbox, many = Inbox(), commands(MOST_GATHERED + 1)
    with inbox.together():
        for command in many:
            inbox.post(command)
        assert taken(inbox) == many[:-1]
    assert taken(inbox) == many[-1:]


def test_other_threads_do_not_wait_for_what_one_gathers() -> None:
    inbox, (own, other) = Inbox(), commands(2)
    with inbox.together():
        inbox.post(own)
        thread = threading.Thread(target=inbox.post, args=(other,))
        thread.start()
        thread.join()
        assert taken(inbox) == [other]
    assert taken(inbox) == [own]


def test_after_an_error_what_was_gathered_is_dropped() -> None:
    inbox, (lost, kept) = Inbox(), commands(2)

    def fail() -> None:
        with inbox.together():
            inbox.post(lost)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    inbox.post(kept)
    assert taken(inbox) == [kept]


def test_a_closed_inbox_takes_nothing_but_gives_what_it_has() -> None:
    inbox, (before, after) = Inbox(), commands(2)
    inbox.post(before)
    inbox.close()
    with pytest.raises(EngineStopped):
        inbox.post(after)
    with pytest.raises(EngineStopped), inbox.together():
        inbox.post(after)
    assert inbox.take(nullcontext()) == ([before], True)
