"""Which replica a request goes to. Knows marks of prefixes (`niwaki.radix.summary`) and names; nothing of Ray."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from niwaki.radix.summary import BLOCK_TOKENS

# A request that runs or waits somewhere weighs as much as that many tokens to be computed: where 512 are cached, eight
# more may wait than elsewhere before another replica computes them, too.
REQUEST_TOKENS = 64
MAX_SENT = 100_000  # marks; should summaries stay away
RECENT = 256  # requests whose marks are in use
MAX_OVER = 1024  # ends that wait for their beginning: of a request that was not taken it never comes


@dataclass(slots=True)
class _Replica:
    """What is known of one. Its summaries are a little old, so what was sent there since stands beside them."""

    held: frozenset[bytes] = frozenset()
    sent: set[bytes] = field(default_factory=set)  # since the last summary, which did not tell of it
    sent_before: set[bytes] = field(default_factory=set)  # since the one before; the last may be too old to tell of it
    running: set[str] = field(default_factory=set)  # ids of requests
    over: dict[str, None] = field(default_factory=dict)  # those of which the end was told, but not yet the beginning
    in_use: Counter[bytes] = field(default_factory=Counter)  # marks, by how many recent requests began like it

    def num_held(self, marks: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks it has."""
        for place, mark in enumerate(marks):
            if mark not in self.held and mark not in self.sent and mark not in self.sent_before:
                return place
        return len(marks)

    def num_used_with(self, marks: Sequence[bytes]) -> int:
        """How many marks would be in use with a prompt's."""
        return len(self.in_use) + sum(mark not in self.in_use for mark in marks)

    @property
    def num_known(self) -> int:
        return len(self.held) + len(self.sent) + len(self.sent_before)


class Routing:
    """The state of one router: what each replica holds, and how much it was given. Has one user at a time.

    A request goes where least has to be done: tokens of its prompt that are not cached, what runs there already, at
    REQUEST_TOKENS each, and what its own tokens push out of the cache, where more is in use than elsewhere. So requests
    follow their prefix, leave it where too many do, and new prefixes are spread whoever is busy at the moment.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._recent: deque[tuple[str, Sequence[bytes]]] = deque()  # where requests went

    def stand(self, names: Collection[str]) -> None:
        """These replicas are there, and no others."""
        self._replicas = {name: self._replicas.get(name) or _Replica() for name in names}

    def hold(self, name: str, marks: Iterable[bytes]) -> None:
        """A replica tells what it holds."""
        replica = self._replicas[name]
        replica.held = frozenset(marks)
        replica.sent, replica.sent_before = set(), replica.sent - replica.held

    def ranked(self, marks: Sequence[bytes]) -> list[str]:
        """All replicas, the best for a prompt first. Among equals the one that holds least."""

        in_use = {name: replica.num_used_with(marks) for name, replica in self._replicas.items()}
        least = min(in_use.values(), default=0)

        def price(name: str) -> tuple[int, int, str]:
            replica = self._replicas[name]
            missing = len(marks) - replica.num_held(marks)
            pushed_out = min(missing, in_use[name] - least)
            tokens = (missing + pushed_out) * BLOCK_TOKENS + len(replica.running) * REQUEST_TOKENS
            return tokens, replica.num_known, name

        return sorted(self._replicas, key=price)

    def choose(self, names: Collection[str], marks: Sequence[bytes]) -> list[str]:
        """Those of `names` in the order in which they are to be asked; the first is taken to get the prompt. Who is not
        known yet comes last. None where none is to be had."""
        known = [name for name in self.ranked(marks) if name in names]
        chosen = known + sorted(set(names).difference(known))
        if chosen:
            self.send(chosen[0], marks)
        return chosen

    def send(self, name: str, marks: Iterable[bytes]) -> None:
        """A prompt goes to a replica: others that begin like it should follow at once."""
        replica = self._replicas.get(name)
        if replica is None:  # gone since it was chosen
            return
        if len(replica.sent) > MAX_SENT:
            replica.sent, replica.sent_before = set(), replica.sent
        new = set(marks) - replica.held
        replica.sent |= new
        replica.sent_before -= new

    def begin(self, name: str, request_id: str, marks: Sequence[bytes] = ()) -> None:
        """A replica took a request. Of the shortest ones this may be told behind their end."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        if request_id in replica.over:
            del replica.over[request_id]
        else:
            replica.running.add(request_id)
        replica.in_use.update(marks)
        self._recent.append((name, marks))
        if len(self._recent) > RECENT:
            past, old = self._recent.popleft()
            if past in self._replicas:
                in_use = self._replicas[past].in_use
                in_use.subtract(old)
                for mark in old:
                    if in_use[mark] <= 0:
                        del in_use[mark]

    def end(self, name: str, request_id: str) -> None:
        """A request is over, however it ended, or was not taken."""
        replica = self._replicas.get(name)
        if replica is None:
            return
        if request_id in replica.running:
            replica.running.remove(request_id)
            return
        replica.over[request_id] = None
        if len(replica.over) > MAX_OVER:
            del replica.over[next(iter(replica.over))]
