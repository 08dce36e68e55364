"""A script on a server: one request, whose events answer the calls that the program's states then make."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from niwaki.lang.place import joined
from niwaki.lang.remote_branch import RemoteBranch
from niwaki.lang.remote_link import LongCall
from niwaki.lang.remote_wire import (
    Json,
    as_int,
    as_list,
    as_object,
    as_told,
    error_of,
    ids_of,
    output_of,
    params_json,
    score_of,
    unexpected,
)
from niwaki.runtime.api import Cancelled, EngineStopped, Generation, Pending, SamplingParams, Score, Segment
from niwaki.runtime.api.script import Choose, Generate, Op, Part, Say, Script, Split

if TYPE_CHECKING:
    from niwaki.lang.remote import RuntimeEndpoint

OpKind = TypeVar("OpKind", Generate, Choose, Split)

REPLAYED = "states replay what they wrote down"


class ScriptRun:
    """One script on its way. The results come on the thread that reads the answer.

    When every branch of it that somebody had is closed, the request is cancelled.
    """

    def __init__(self, endpoint: RuntimeEndpoint, script: Script) -> None:
        """Raises UnsupportedByBackend: a call of it cannot be sent to a server."""
        self.endpoint = endpoint
        self.script = script
        self.names: dict[int, str] = {}  # of the branches that stay open, on the server
        self.ended: Pending[tuple[int, ...] | None] = Pending()  # with the tokens of the first branch
        self.texts: dict[int, str] = {}  # of the calls, as they come
        self._body: Json = {"branches": [[_op_json(op) for op in ops] for ops in script.branches]}
        self._body["is_over"] = script.is_over
        calls = (op for ops in script.branches for op in ops if isinstance(op, Generate | Choose))
        self._results = {op.call: _result_of(op) for op in calls}
        self._call = LongCall()
        self._has_begun: Pending[None] = Pending()
        self._lock = threading.Lock()
        self._num_open = 0

    def begin(self) -> ScriptBranch:
        """Send it. Where more may follow, the server's names of the branches are known afterwards."""
        first = ScriptBranch(self, 0, ())
        self.endpoint.start(self._follow)
        if not self.script.is_over:
            self._has_begun.result()
        return first

    def result(self, call: int) -> Generation | Pending[tuple[Score, ...]]:
        return self._results[call]

    def has_opened(self) -> None:
        with self._lock:
            self._num_open += 1

    def has_closed(self) -> None:
        with self._lock:
            self._num_open -= 1
            is_unwanted = self._num_open == 0
        if is_unwanted and not all(result.is_done for result in self._results.values()):
            self._call.cancel()

    def text(self, parts: Sequence[Part]) -> str:
        return "".join(part if isinstance(part, str) else self.texts[part] for part in parts)

    def _follow(self) -> None:
        try:
            for event in self.endpoint.events(self._call, "/scripts", self._body):
                self._take(event)
            error: Exception = EngineStopped(f"{self.endpoint!r} closed the connection before the script ended")
        except Exception as failed:  # whoever waits must be told, whatever it was
            error = as_told(failed)
        self.ended.fail(error)  # this and the next: nothing, where it was there
        self._has_begun.succeed(None)
        for result in self._results.values():
            result.fail(error)

    def _take(self, event: Json) -> None:
        if "branches" in event:
            self.names = {int(number): str(name) for number, name in as_object(event["branches"]).items()}
            self._has_begun.succeed(None)
        elif "token_ids" in event:
            token_ids = event["token_ids"]
            self.ended.succeed(None if token_ids is None else ids_of(token_ids))
        elif "call" not in event:
            raise error_of(500, event)
        else:
            call = as_int(event["call"])
            if call not in self._results:
                raise unexpected(f"there is no call {call}")
            result = self._results[call]
            if "error" in event:
                result.fail(error_of(as_int(event["status"]), event))
                return
            self.texts[call] = str(event["text"])
            if isinstance(result, Generation):
                result.succeed(tuple(output_of(as_object(one)) for one in as_list(event["outputs"])))
            else:
                result.succeed(tuple(score_of(as_object(one)) for one in as_list(event["scores"])))


class ScriptBranch(RemoteBranch):
    """A branch whose first calls and forks the script makes. Behind them it is one on the server as any other."""

    __slots__ = ("_is_closed", "_ops", "_run", "_segments", "number")

    def __init__(self, run: ScriptRun, number: int, segments: Sequence[Segment]) -> None:
        super().__init__(run.endpoint, "")
        self.number = number
        self._run = run
        self._ops = [op for op in reversed(run.script.branches[number]) if not isinstance(op, Say)]
        self._segments = list(segments)  # all text, as long as the script makes it
        self._is_closed = False
        run.has_opened()

    @property
    def id(self) -> str:
        """Where the server has closed it, the script being over, it is a new one with the same text, sent again."""
        if not self._id:
            name = self._run.names.get(self.number)
            if name is None:
                name = self.endpoint.open().id
                self.unsent = list(joined([*self._segments, *self.unsent]))
            self._id = name
        return self._id

    def next_generation(self, delta: Sequence[Segment], params: SamplingParams) -> Generation | None:
        op = self._next(Generate)
        if op is None:
            return None
        assert op.params == params, REPLAYED
        self._says(delta)
        generation = self._run.result(op.call)
        assert isinstance(generation, Generation)
        generation.add_done_callback(lambda: self._takes(generation))
        return generation

    def next_scores(self, delta: Sequence[Segment], continuations: Sequence[str]) -> Pending[tuple[Score, ...]] | None:
        op = self._next(Choose)
        if op is None:
            return None
        assert op.choices == tuple(continuations), REPLAYED
        self._says(delta)
        pending = self._run.result(op.call)
        assert not isinstance(pending, Generation)
        return pending

    def next_fork(self) -> RemoteBranch | None:
        op = self._next(Split)
        if op is None:
            return None
        self._says(())
        return ScriptBranch(self._run, op.branch, self._segments)

    def told_token_ids(self) -> Sequence[int] | None:
        if self._id or self._ops or self.number or not self._run.script.is_over:
            return None
        token_ids = self._run.ended.result()
        ops = self._run.script.branches[0]
        last = max((at for at, op in enumerate(ops) if not isinstance(op, Say)), default=-1)
        said = "".join(self._run.text(op.parts) for op in ops[last + 1 :] if isinstance(op, Say))
        is_whole = said == "".join(segment.text for segment in self.unsent)
        return token_ids if is_whole else None

    def closed(self) -> str | None:
        if self._is_closed:
            return None
        self._is_closed = True
        self._run.has_closed()
        return self._id or self._run.names.get(self.number)

    def _next(self, kind: type[OpKind]) -> OpKind | None:
        """What the script does next here, which must be that; None: the script has nothing more."""
        if not self._ops:
            return None
        op = self._ops.pop()
        assert isinstance(op, kind), REPLAYED
        return op

    def _says(self, delta: Sequence[Segment]) -> None:
        self._segments += [*self.unsent, *delta]
        self.unsent = []

    def _takes(self, generation: Generation) -> None:
        if generation.error() is None:
            self._segments.append(Segment(generation.result()[0].text))


def _result_of(op: Generate | Choose) -> Generation | Pending[tuple[Score, ...]]:
    """Cancelling it ends the wait here. The server goes on with what others of the script still want."""
    result: Generation | Pending[tuple[Score, ...]]

    def cancel() -> None:
        result.fail(Cancelled("the request was cancelled"))

    result = Generation(cancel) if isinstance(op, Generate) else Pending(cancel)
    return result


def _op_json(op: Op) -> Json:
    match op:
        case Say(parts, control):
            return {"do": "say", "parts": list(parts), "control": control}
        case Generate(call, params):
            return {"do": "generate", "call": call, "params": params_json(params)}
        case Choose(call, choices, method, heal, params):
            draw = {} if params is None else {"params": params_json(params)}
            return {"do": "choose", "call": call, "choices": list(choices), "method": method, "heal": heal, **draw}
        case Split(branch):
            return {"do": "split", "branch": branch}
