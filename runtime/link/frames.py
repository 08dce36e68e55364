"""What the API process and the engine process say to each other, as msgpack messages; `link` brings them over."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from niwaki.radix.outline import OutlineNode
from niwaki.runtime import api
from niwaki.runtime.api import Delta, GenerationError, NiwakiError, Output, Score, errors, script
from niwaki.runtime.api.likeliest import Likeliest, Packed, TextOf
from niwaki.runtime.options.limits import TokenIds

if TYPE_CHECKING:
    from niwaki.runtime.engine import Engine  # loads torch

Said = dict[str, object]

# ---------------------------------------------------------------------------------------------------------------
# To the engine
# ---------------------------------------------------------------------------------------------------------------


class Load(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """First of all: the model folder (None: the bundled one) and the engine's options."""

    model: str | None
    options: Said


class Start(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Generate. The prompt is the first `keep` tokens of `branch`, then `tail` (int32); branch 0 is none. Its first
    `settled` tokens are never taken back. Without `streams` no piece is told, the end alone, unless `Listen` comes."""

    id: int
    branch: int
    keep: int
    tail: bytes
    params: object  # `plain` of SamplingParams
    namespace: str
    logits_from: int | None
    settled: int
    streams: bool
    program: int  # of the branch: the number of that from which it was forked first; 0: it stands for itself


class Weigh(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Score continuations behind the same kind of prompt, as `Backend.score`."""

    id: int
    branch: int
    keep: int
    tail: bytes
    namespace: str
    settled: int
    continuations: tuple[str, ...]
    heal: bool
    unconditional: bool
    program: int  # as of `Start`


class Fork(msgspec.Struct, tag=3, array_like=True, frozen=True):
    branch: int
    twin: int


class Close(msgspec.Struct, tag=4, array_like=True, frozen=True):
    branch: int


class Cancel(msgspec.Struct, tag=5, array_like=True, frozen=True):
    id: int


class Flush(msgspec.Struct, tag=6, array_like=True, frozen=True):
    id: int


class Look(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Tell the shape of the tree."""

    id: int
    limit: int
    namespace: str


class RunScript(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """Carry out a script. What is left open has these numbers then, by branch; none where it is over with the script.
    `Cancel` ends it, and must come in any case: what was not left open is closed then."""

    id: int
    script: object  # `plain` of Script
    namespace: str
    branches: tuple[int, ...]


class Demote(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """As `LocalBackend.demote`."""

    branch: int


class Listen(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """Tell the pieces of a generation that was started without, from the first one on. With `reads` somebody waits for
    each."""

    id: int
    reads: bool


Order = Load | Start | Weigh | Fork | Close | Cancel | Flush | Look | RunScript | Demote | Listen

# ---------------------------------------------------------------------------------------------------------------
# From the engine
# ---------------------------------------------------------------------------------------------------------------


class Loaded(msgspec.Struct, tag=20, array_like=True, frozen=True):
    """The model is there, its kernels are warm."""

    model: str
    context_length: int
    pool_tokens: int
    vocab_size: int
    max_running: int
    defaults: object  # `plain` of SamplingOptions
    settings: Said
    weights: str  # as `BackendInfo.weights`


class Piece(msgspec.Struct, tag=21, array_like=True, frozen=True, gc=False):
    id: int
    delta: Delta


class Pieces(msgspec.Struct, tag=34, array_like=True, frozen=True, gc=False):
    """Of a step: `deltas[i]` is a piece of the i-th of `ids`, which are int64 numbers as bytes: one comparison tells
    that they are those of the step before, as they mostly are."""

    ids: bytes
    deltas: list[Delta]

    @staticmethod
    def of(numbers: Sequence[int], deltas: list[Delta]) -> Pieces:
        return Pieces(array("q", numbers).tobytes(), deltas)

    def numbers(self) -> Sequence[int]:
        return array("q", self.ids)


Tops = tuple[int, int, bytes, bytes]  # of the output in that place: how many of each token, and `likeliest.Packed`


class Ended(msgspec.Struct, tag=22, array_like=True, frozen=True):
    """Its branch has now the first `same` tokens of the prompt, then those of `behind` (int32). `outputs` and `tops` as
    `bare` gives them."""

    id: int
    outputs: tuple[Output, ...]
    same: int
    behind: bytes
    tops: tuple[Tops, ...] = ()


class Weighed(msgspec.Struct, tag=23, array_like=True, frozen=True):
    """`num_open`: as many of the branch's last tokens are tokenized again with the text that comes next."""

    id: int
    scores: tuple[Score, ...]
    num_open: int


class Failed(msgspec.Struct, tag=24, array_like=True, frozen=True):
    """`kind` is the name of an error of `niwaki.runtime.api`."""

    id: int
    kind: str
    message: str


class Accepted(msgspec.Struct, tag=25, array_like=True, frozen=True):
    """Its constraint is compiled: nothing that can be told at once is wrong."""

    id: int


class Flushed(msgspec.Struct, tag=26, array_like=True, frozen=True):
    id: int
    is_done: bool


class Beat(msgspec.Struct, tag=27, array_like=True, frozen=True):
    """It lives. `usage` as `Backend.usage`."""

    usage: dict[str, float]


class Seen(msgspec.Struct, tag=28, array_like=True, frozen=True):
    id: int
    nodes: tuple[OutlineNode, ...]


class CallEnded(msgspec.Struct, tag=29, array_like=True, frozen=True):
    """A call of a script gave this: `outputs`, or the `scores` by which `text` was chosen. `tops` as in `Ended`."""

    id: int
    call: int
    text: str
    outputs: tuple[Output, ...]
    scores: tuple[Score, ...]
    tops: tuple[Tops, ...] = ()


class CallFailed(msgspec.Struct, tag=30, array_like=True, frozen=True):
    """`kind` and `message` as in `Failed`."""

    id: int
    call: int
    kind: str
    message: str


class LaneEnded(msgspec.Struct, tag=31, array_like=True, frozen=True):
    """A branch that a script leaves open stands here."""

    id: int
    lane: int
    ids: bytes
    settled: int
    num_open: int  # as in `Weighed`


class ScriptBegun(msgspec.Struct, tag=32, array_like=True, frozen=True):
    id: int


class ScriptOver(msgspec.Struct, tag=33, array_like=True, frozen=True):
    """With the tokens of its first branch, where that ended with it."""

    id: int
    token_ids: tuple[int, ...] | None


ScriptReport = CallEnded | CallFailed | LaneEnded | ScriptBegun | ScriptOver | Failed
Rare = Loaded | Ended | Weighed | Accepted | Flushed | Beat | Seen | ScriptReport
Report = Piece | Rare
Message = Report | Pieces  # what a frame holds

# ---------------------------------------------------------------------------------------------------------------
# Plain data that msgpack has no type for
# ---------------------------------------------------------------------------------------------------------------

KINDS: Mapping[str, type] = {
    name: kind
    for module in (api, script)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and is_dataclass(kind)
}
ERRORS: Mapping[str, type[NiwakiError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, NiwakiError)
}
KIND = "kind of"  # no field has such a name


def plain(value: object) -> object:
    """Data of `niwaki.runtime.api` as maps with their class's name. Fields at their defaults are left out."""
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    if not is_dataclass(value):
        return value
    said: Said = {KIND: type(value).__name__}
    for f in fields(value):
        part = getattr(value, f.name)
        if part is not f.default:
            said[f.name] = plain(part)
    return said


def meant(value: object) -> object:
    """What `plain` was given. Lists are tuples again."""
    if isinstance(value, list):
        return tuple(meant(part) for part in value)
    if isinstance(value, dict) and KIND in value:
        return KINDS[value[KIND]](**{name: meant(part) for name, part in value.items() if name != KIND})
    return value


def loaded_by(engine: Engine) -> Loaded:
    """What there is to know of an engine that is loaded."""
    info = engine.backend.info()
    settings = engine.get_server_info()
    pool_tokens = settings["kv_tokens"]
    assert isinstance(pool_tokens, int)
    return Loaded(
        model=info.model,
        context_length=info.context_length,
        pool_tokens=pool_tokens,
        vocab_size=engine.vocab_size,
        max_running=engine.config.max_running_requests,
        defaults=plain(info.defaults),
        settings=settings,
        weights=info.weights,
    )


def gathered(reports: Sequence[Report]) -> Sequence[Message]:
    """The same with all pieces as one message, before the others, which is how they are taken in. Reading 32 by
    themselves took the server twice as long."""
    pieces = [report for report in reports if isinstance(report, Piece)]
    if len(pieces) < 2:
        return reports
    rest = [] if len(pieces) == len(reports) else [report for report in reports if not isinstance(report, Piece)]
    return [Pieces.of([piece.id for piece in pieces], [piece.delta for piece in pieces]), *rest]


def failed(request_id: int, error: BaseException) -> Failed:
    """An error for the other side."""
    return Failed(request_id, *_told(error))


def call_failed(script_id: int, call: int, error: BaseException) -> CallFailed:
    return CallFailed(script_id, call, *_told(error))


def unwritten(report: Report, error: Exception) -> Report | None:
    """What is told instead of a report that msgpack cannot write, so that nobody waits for it for ever. None: nobody
    does."""
    match report:
        case CallEnded(id, call) | CallFailed(id, call):
            return call_failed(id, call, error)
        case Loaded():
            return failed(0, error)
        case Beat():
            return None
        case _:
            return failed(report.id, error)


def _told(error: BaseException) -> tuple[str, str]:
    """Its kind and message. What is none of ours is told by its type: its text may hold anything."""
    for kind in type(error).__mro__:
        if kind.__name__ in ERRORS:
            return kind.__name__, str(error)
    return GenerationError.__name__, f"{type(error).__name__} in the engine process"


def error_of(report: Failed | CallFailed) -> NiwakiError:
    return ERRORS[report.kind](report.message)


def bare(outputs: tuple[Output, ...]) -> tuple[tuple[Output, ...], tuple[Tops, ...]]:
    """Without their likeliest tokens, and these: 8 answers of 64 tokens with 20 each took 2.2 to 4.3 ms to be
    read as objects."""
    tops: list[Tops] = []
    for place, output in enumerate(outputs):
        if isinstance(output.top_logprobs, Likeliest):
            tops.append((place, output.top_logprobs.width, *output.top_logprobs.packed))
    if not tops:
        return outputs, ()
    has_own = {place for place, *_ in tops}
    return tuple(
        replace(output, top_logprobs=()) if place in has_own else output for place, output in enumerate(outputs)
    ), tuple(tops)


def whole(outputs: tuple[Output, ...], tops: Sequence[Tops], text: TextOf) -> tuple[Output, ...]:
    """What `bare` was given. `text`: of a token."""
    if not tops:
        return outputs
    made = list(outputs)
    for place, width, ids, logprobs in tops:
        made[place] = replace(made[place], top_logprobs=Likeliest(Packed(ids, logprobs), width, text))
    return tuple(made)


def packed(ids: TokenIds) -> bytes:
    return ids.astype(np.int32, copy=False).tobytes()
