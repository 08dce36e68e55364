"""The score calls behind one select: one, or two where its method also looks at the choices without a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from niwaki.lang.backends import Lease
from niwaki.lang.nodes import Select
from niwaki.runtime.api import Backend, Branch, Pending, Score, Segment

Scores = tuple[Score, ...]


def scores_for(node: Select, backend: Backend, branch: Branch, delta: Sequence[Segment]) -> Pending[Scores]:
    """One score per choice and, where the method needs them, behind those the unconditional ones in the same order."""
    given = backend.score(branch, delta, node.choices)
    if not node.method.needs_unconditional:
        return given
    try:
        lease = Lease(backend, backend.open())
        alone = backend.score(lease.branch, (), node.choices)
    except BaseException:
        given.cancel()
        raise
    return _both(given, alone, lease)


def parted(node: Select, scores: Scores) -> tuple[Scores, Scores]:
    """(the scores given the text, the unconditional ones or none)."""
    count = len(node.choices)
    return scores[:count], scores[count:]


def _both(first: Pending[Scores], second: Pending[Scores], lease: Lease) -> Pending[Scores]:
    """The results of both, one behind the other; the first error of either. Keeps the second's branch meanwhile."""
    parts = (first, second)

    def cancel() -> None:
        for part in parts:
            part.cancel()

    both: Pending[Scores] = Pending(cancel)

    def on_done(lease: Lease = lease) -> None:  # the callbacks, which go when both are done, hold the branch
        error = next((error for part in parts if (error := part.error()) is not None), None)
        if error is not None:
            both.fail(error)
            cancel()
        elif all(part.is_done for part in parts):
            both.succeed(first.result(0) + second.result(0))

    for part in parts:
        part.add_done_callback(on_done)
    return both
