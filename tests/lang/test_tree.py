"""The tree of a run: every piece of text stands where it was made, with how it came to be."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace

import pytest

import niwaki as nw
from niwaki.lang.state import State
from niwaki.lang.tree import Chosen, Forked, Generated, Joined, Prompt, Set, Tree
from niwaki.runtime.api.readiness import readiness


def kinds(tree: Tree) -> list[str]:
    return [type(item).__name__ for item in tree.trunk.items]


def test_pieces_stand_in_order_with_how_they_came_to_be() -> None:
    backend = nw.ScriptedBackend({"one two ": "three", "five ": "six"})

    @nw.function
    def f(s: State) -> None:
        s += "one two " + nw.gen("x")
        s += " four five " + nw.gen("y")
        s += " seven"

    tree = f.run(backend=backend).tree()
    assert tree.program == "f"
    assert kinds(tree) == ["Prompt", "Generated", "Prompt", "Generated", "Prompt"]
    items = [item for item in tree.trunk.items if isinstance(item, Prompt | Generated)]
    assert [item.text for item in items] == ["one two ", "three", " four five ", "six", " seven"]
    assert [item.how for item in items] == ["prefilled", "sampled", "prefilled", "sampled", "unread"]
    assert tree.trunk.text == "one two three four five six seven"
    assert dict(tree.trunk.variables) == {"x": "three", "y": "six"}
    assert tree.trunk.error is None
    assert tree.trunk.is_done


def test_what_forks_share_is_prefilled_once_and_cached_for_the_rest() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "x")

    @nw.function
    def f(s: State) -> None:
        s += "one two three four five six"
        forks = s.fork(3)
        forks += " next" + nw.gen("x")
        forks.join()
        s += " and last" + nw.gen("y")

    tree = f.run(backend=backend).tree()
    assert kinds(tree) == ["Prompt", "Forked", "Joined", "Prompt", "Generated"]
    shared, forked, joined = tree.trunk.items[:3]
    assert isinstance(shared, Prompt)
    assert (shared.tokens, shared.cached, shared.how) == (6, 0, "prefilled")
    assert isinstance(forked, Forked)
    assert [limb.path for limb in forked.limbs] == [(0,), (1,), (2,)]
    assert [limb.text for limb in forked.limbs] == [" nextx"] * 3
    calls = [item for limb in forked.limbs for item in limb.items if isinstance(item, Generated)]
    assert [(call.prompt_tokens, call.cached_tokens) for call in calls] == [(7, 0), (7, 6), (7, 6)]
    assert isinstance(joined, Joined)
    assert joined.names == ("x",)
    assert all(limb.joined == joined.at for limb in forked.limbs)
    totals = tree.totals()
    assert (totals.limbs, totals.calls, totals.prefilled, totals.cached) == (4, 4, 6 + 3 + 2, 0)
    # What the engine counts is what the picture counts.
    assert totals.prompt_tokens - totals.reused_tokens == backend.usage()["prefilled_tokens"]


def test_forks_of_forks_have_paths_and_later_forks_go_on_counting() -> None:
    @nw.function
    def f(s: State) -> None:
        s += "a"
        for _ in range(2):
            forks = s.fork(2)
            inner = forks[1].fork(1)
            inner += nw.gen("x")
            inner.join()
            forks.join("concat")

    tree = f.run(backend=nw.ScriptedBackend(lambda prompt: "x")).tree()
    assert [limb.path for limb in tree.limbs()] == [(), (0,), (1,), (1, 0), (2,), (3,), (3, 0)]


def test_a_select_keeps_every_choice_and_the_next_text_does_not_count_it_again() -> None:
    @nw.function
    def f(s: State) -> None:
        s += "it is " + nw.select("color", choices=["dark blue", "red"])
        s += ", yes" + nw.gen("x", max_tokens=0)

    tree = f.run(backend=nw.ScriptedBackend({"is ": "dark blue", "": "z"})).tree()
    assert kinds(tree) == ["Prompt", "Chosen", "Prompt", "Generated"]
    chosen, then = tree.trunk.items[1:3]
    assert isinstance(chosen, Chosen)
    assert (chosen.text, chosen.tokens, chosen.how) == ("dark blue", 2, "selected")
    assert [(choice.text, choice.tokens) for choice in chosen.choices] == [("dark blue", 2), ("red", 1)]
    assert all(choice.logprob is not None and choice.logprob < 0 for choice in chosen.choices)
    assert isinstance(then, Prompt)
    assert (then.text, then.tokens) == (", yes", 2)


def test_template_text_is_told_from_what_the_author_wrote() -> None:
    backend = nw.ScriptedBackend(["Hello!"])

    @nw.function
    def f(s: State) -> None:
        s += nw.user("Hi") + nw.assistant(nw.gen("x"))

    prompt = f.run(backend=backend).tree().trunk.items[0]
    assert isinstance(prompt, Prompt)
    assert [(part.role, part.control) for part in prompt.parts] == [
        ("user", True),
        ("user", False),
        ("user", True),
        ("assistant", True),
    ]
    assert prompt.parts[1].text == "Hi"


def test_log_probabilities_samples_and_settings_are_kept_where_asked() -> None:
    @nw.function
    def f(s: State) -> None:
        s += "q" + nw.gen("x", n=2, return_logprob=True, temperature=0.5) + nw.gen("y", dtype=int)
        s["z"] = 5

    tree = f.run(backend=nw.ScriptedBackend(["one two", "one", "7"])).tree()
    first, second = (item for item in tree.trunk.items if isinstance(item, Generated))
    assert len(first.others) == 1
    assert first.temperature == 0.5
    assert first.logprob is not None
    assert first.logprob < 0
    assert (second.logprob, second.type) == (None, "int")
    assert "gen(" in first.line
    assert tree.trunk.items[-1] == Set("z", 5)
    assert tree.trunk.variables["z"] == 5


def test_a_failed_run_has_a_tree_with_its_error() -> None:
    backend = nw.ScriptedBackend({"ok ": "fine", "bad ": nw.CapacityError("the pool is full")})

    @nw.function
    def f(s: State) -> None:
        s += "start "
        forks = s.fork(2)
        forks += ["ok ", "bad "]
        forks += nw.gen("x")
        forks.join()

    state = f.run(backend=backend)
    tree = state.tree()
    good, bad = tree.trunk.forks()
    assert good.error is None
    assert isinstance(bad.error, nw.CapacityError)
    assert not bad.is_done
    assert bad.joined is None
    assert isinstance(tree.trunk.error, nw.CapacityError)
    with pytest.raises(nw.CapacityError):
        state.sync()


def test_a_tree_holds_no_branch_of_the_runtime() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "x")

    @nw.function
    def f(s: State) -> None:
        s += "a"
        forks = s.fork(4)
        forks += nw.gen("x")
        forks.join()

    state = f.run(backend=backend)
    tree = state.tree()
    del state
    late = time.monotonic() + 60
    while backend.num_open_branches and time.monotonic() < late:
        time.sleep(0.01)
    assert backend.num_open_branches == 0
    assert len(list(tree.limbs())) == 5


def test_a_tree_is_frozen_and_a_later_one_goes_further() -> None:
    state = nw.function(lambda s: None).run(backend=nw.ScriptedBackend(lambda prompt: "x"))
    state += "a"
    before = state.tree()
    state += "b" + nw.gen("x")
    assert (before.trunk.text, state.tree().trunk.text) == ("a", "abx")
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.trunk.items = ()  # type: ignore[misc]  # refused, as it says


def test_times_are_in_order_and_waiting_is_waited_for() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "one two", threads=2, delay=0.002)

    @nw.function
    def f(s: State) -> None:
        s += "a"
        forks = s.fork(2)
        forks += nw.gen("x")
        forks.join()

    tree = f.run(backend=backend).tree()
    joined = tree.trunk.items[-1]
    assert isinstance(joined, Joined)
    for limb in tree.trunk.forks():
        [call] = (item for item in limb.items if isinstance(item, Generated))
        assert call.seconds is not None
        assert limb.start is not None
        assert 0 <= limb.start <= call.start < call.start + call.seconds <= joined.at <= tree.seconds
        assert call.seconds >= 0.002


def test_no_time_passes_while_something_is_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = 0.0
    moved = SimpleNamespace(monotonic=lambda: time.monotonic() + gone)
    monkeypatch.setattr("niwaki.runtime.api.readiness.time", moved)

    def load(prompt: str) -> str:
        nonlocal gone
        with readiness:
            gone += 3600
        return "one"

    @nw.function
    def f(s: State) -> None:
        s += "a" + nw.gen("x") + nw.gen("y")

    tree = f.run(backend=nw.ScriptedBackend(load)).tree()
    calls = [item for item in tree.trunk.items if isinstance(item, Generated)]
    assert len(calls) == 2
    assert 0 < calls[0].start < calls[1].start < tree.seconds < 3600


def test_on_the_bundled_model_the_shared_prefix_is_computed_once() -> None:
    from niwaki.runtime.engine import Engine  # loads torch, which most tests do without

    text = "".join(f"Item {index} of the list of the garden. " for index in range(12))

    @nw.function
    def f(s: State) -> None:
        s += text
        forks = s.fork(3)
        forks += lambda index: f"Number {index}:"
        forks += nw.gen("x", max_new_tokens=3, temperature=0, ignore_eos=True)
        forks.join()

    with Engine() as engine:  # its own: in the shared one a program of another test may still hold a beginning
        first = f.run(backend=engine).tree()
        again = f.run(backend=engine).tree()
    shared, again_shared = first.trunk.items[0], again.trunk.items[0]
    assert isinstance(shared, Prompt)
    assert isinstance(again_shared, Prompt)
    assert shared.tokens is not None
    assert shared.tokens > 30
    assert (shared.cached, shared.how) == (0, "prefilled")
    assert again_shared.how == "cached"
    calls = [item for limb in first.trunk.forks() for item in limb.items if isinstance(item, Generated)]
    assert sum((call.cached_tokens or 0) >= shared.tokens for call in calls) == 2
    assert all(call.tokens == 3 for call in calls)


def test_a_program_that_is_called_hangs_where_it_was_called() -> None:
    @nw.function
    def inner(s: State, word: str) -> None:
        s += f"{word}? " + nw.gen("x")

    @nw.function
    def outer(s: State) -> None:
        s += "first " + nw.gen("a")
        s += str(inner(word="tree")["x"])
        s += " then " + nw.gen("b")

    state = outer.run(backend=nw.ScriptedBackend({"tree? ": "oak", "": "yes"}))
    [called] = [item for item in state.tree().trunk.items if isinstance(item, Forked)]
    assert called.program == "inner"
    assert "inner(word=" in called.line
    [limb] = called.limbs
    assert (limb.text, limb.path, limb.is_done) == ("tree? oak", (0,), True)
    assert state.tree().trunk.text == "first yesoak then yes"
    assert "calls inner" in state.show().html
