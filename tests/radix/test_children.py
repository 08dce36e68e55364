"""The children of a node: few, many, and in blocks, against a plain dict."""

from __future__ import annotations

import random

import pytest

from niwaki.radix import children
from niwaki.radix.children import Group, common_tokens


class Leaf:
    """A child that is a number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.group: Group | None = None


def test_sorted_children_agree_with_a_sorted_list_through_all_splits_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "MAX_BLOCK", 4)
    monkeypatch.setattr(children, "FEW", 3)
    rng = random.Random(0)
    tested: children.Children[Leaf] = children.Children(page_bytes=8)
    model: dict[bytes, Leaf] = {}
    for number in range(3000):
        key = bytes([rng.choice(b"\x00\xff"), 0, 0, 1, *rng.choices(b"\x00\x01\x02\xff", k=rng.randint(0, 4))])
        if key in model:
            if rng.random() < 0.5 or number > 2500:
                tested.remove(key)
                del model[key]
            else:
                model[key] = Leaf(number)
                tested.replace(key, model[key])
        elif number <= 2500:
            model[key] = Leaf(number)
            tested.add(key, model[key])
        ordered = sorted(other for other in model if other[:4] == key[:4])
        before = next((other for other in reversed(ordered) if other < key), None)
        assert tested.around(key) == (before, next((other for other in ordered if other >= key), None))
        assert tested.get(key) == model.get(key)
        head = key + rng.choice([b"", b"\0\0\0\1"])
        longest = max((common_tokens(other, head) for other in model), default=0)
        found, num_tokens = tested.nearest(head)
        assert num_tokens == longest
        if tested.pairs is not None:
            assert tested.begins(head) == (longest > 0)
            one = tested.alike(head)
            assert one in model if longest else one is None
            assert one is None or one.startswith(head[:4])
        assert longest == 0 or longest in {common_tokens(other, head) for other in model if model[other] == found}
        if number % 50 == 0:
            assert tested == model
            tested.check()


def test_which_pairs_of_tokens_keys_begin_with_is_known_of_all_that_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "FEW", 3)
    tested: children.Children[Leaf] = children.Children(page_bytes=12)
    known: list[bytes] = []
    made = 0
    for number in range(2000):
        if len(known) > 40:
            tested.remove(known.pop(0))
        key = b"".join(token.to_bytes(4, "little") for token in (number % 7, number, number % 5))
        before = tested.pairs
        tested.add(key, Leaf(number))
        known.append(key)
        made += tested.pairs is not before
        tested.check()
        assert all(tested.nearest(one)[1] == 3 for one in known)
        assert tested.nearest(key[:8] + b"\xff" * 4)[1] == 2
        assert tested.nearest(key[:4] + b"\xff" * 8)[1] == 1
        assert tested.nearest(b"\xff" * 12)[1] == 0
    assert 3 < made < 60, "made anew as keys come, each time of those that are there, and not for each of them"
    assert tested.pairs is not None
    assert len(tested.pairs.marks) <= children.MAX_SLOTS * 64
