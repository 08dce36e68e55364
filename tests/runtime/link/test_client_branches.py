"""Branches as the server's process knows them, where something fails: they stand where they stood."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from niwaki.runtime.api import (
    Cancelled,
    ConstraintError,
    EngineStopped,
    Generation,
    Pending,
    ProgramError,
    Regex,
    RequestError,
    SamplingParams,
    Segment,
)
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.engine import Engine
from niwaki.runtime.host.local import LocalBackend
from niwaki.runtime.host.local_branch import LocalBranch
from niwaki.runtime.link import frames
from niwaki.runtime.link.engine_client import ClientBranch, EngineClient
from niwaki.runtime.link.frames import Order, Report
from niwaki.runtime.link.orders import Orders
from tests.toy import make_model

WEB = ["see http://www.cat.org and http://dog.org", "the cat sat on the mat"] * 3
REFUSED = SamplingParams(constraint=Regex("a{3"))


class Loop:
    """A link to orders on an engine here, both ways at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.client = EngineClient(engine.tokenizer)
        self.orders = Orders(engine.backend, self)
        self.client.connect(self, frames.loaded_by(engine))

    def post(self, message: Order | Report, *, flush: bool = True) -> None:
        if isinstance(message, Order):
            self.orders.take(message)
        else:
            self.client.receive([message])

    def flush(self) -> None: ...


@pytest.fixture
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineClient]:
    with Engine(make_model(tmp_path_factory.mktemp("toy"), texts=WEB), kv_tokens=1024) as engine:
        loop = Loop(engine)
        yield loop.client
        loop.orders.close()


def test_a_branch_whose_continuations_are_refused_stands_where_it_stood(client: EngineClient) -> None:
    branch = client.open()
    client.append(branch, [Segment("the cat")])
    stood = list(branch.token_ids)
    with pytest.raises(RequestError):
        client.score(branch, [Segment(" sat")], [])
    with pytest.raises(RequestError, match="continuation 1 is empty"):  # the engine finds that
        client.score(branch, [Segment(" sat")], ["a", ""]).result(60)
    assert list(branch.token_ids) == stood
    client.disconnect(EngineStopped("gone"))
    with pytest.raises(EngineStopped):
        client.score(branch, [Segment(" sat")], ["a"])
    assert list(branch.token_ids) == stood


def test_what_cannot_be_written_is_refused_and_leaves_nothing_behind(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = Loop.post

    def written(self: Loop, message: Order | Report, *, flush: bool = True) -> None:
        msgspec.msgpack.encode(message)
        post(self, message, flush=flush)

    monkeypatch.setattr(Loop, "post", written)
    branch = client.open()
    client.append(branch, [Segment("the cat")])
    stood = list(branch.token_ids)
    for params in (SamplingParams(stop=("\ud800",)), SamplingParams(constraint=Regex("\ud800"))):
        with pytest.raises(RequestError, match=r"cannot be sent to the engine: .* surrogates not allowed"):
            client.generate(branch, [Segment(" sat")], params)
    with pytest.raises(RequestError, match="surrogates not allowed"):
        client.score(branch, [Segment(" sat")], ["a", "\ud800"])
    assert list(branch.token_ids) == stood
    assert not branch.running
    assert not client._asked
    assert client.generate(branch, [], SamplingParams(max_new_tokens=1)).result(60)


def test_a_fork_waits_for_the_order_that_makes_use_of_it(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    branch = client.open()
    client.append(branch, [Segment("the cat")])
    client.generate(branch, [], SamplingParams(max_new_tokens=1)).result(60)
    posted: list[tuple[type, bool]] = []
    post = Loop.post

    def noted(self: Loop, message: Order | Report, *, flush: bool = True) -> None:
        if isinstance(message, Order):
            posted.append((type(message), flush))
        post(self, message, flush=flush)

    monkeypatch.setattr(Loop, "post", noted)
    twin = client.fork(branch)
    client.generate(twin, [Segment(" sat")], SamplingParams(max_new_tokens=1)).result(60)
    assert posted == [(frames.Fork, False), (frames.Start, True)]


def test_branches_forked_before_the_engine_has_any_of_them_are_one_program_there(client: EngineClient) -> None:
    first, other = client.open(), client.open()
    for each in (first, other):
        client.append(each, [Segment("the cat")])
    twins = [client.fork(first) for _ in range(2)]
    client.generate(twins[0], [], SamplingParams(max_new_tokens=1)).result(60)
    client.score(twins[1], [], [" sat"]).result(60)
    for each in (first, client.fork(twins[0]), other):
        client.generate(each, [], SamplingParams(max_new_tokens=1)).result(60)
    there = client._link
    assert isinstance(there, Loop)
    programs = [branch.program for branch in there.orders._branches.values()]
    assert len(programs) == 5
    assert programs[:4] == [programs[0]] * 4
    assert programs[4] != programs[0]


def test_what_stands_open_behind_choices_stays_open_for_forks_and_after_an_error(client: EngineClient) -> None:
    branch = client.open()
    client.append(branch, [Segment("see http:")])
    client.score(branch, [], ["//www", " the cat"], heal=True).result(60)
    assert branch.num_open
    twin = client.fork(branch)
    with pytest.raises(ConstraintError):
        client.generate(branch, [Segment("//www")], REFUSED)
    for each in (branch, twin):
        client.append(each, [Segment("//www")])
    whole = client.open()
    client.append(whole, [Segment("see http://www")])
    assert list(branch.token_ids) == list(twin.token_ids) == list(whole.token_ids)


@pytest.mark.parametrize("keeps_branches", [True, False])
def test_what_belongs_together_takes_its_places_together_there(
    client: EngineClient, keeps_branches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[int | None] = []
    start = LocalBackend.start

    def noted(self: LocalBackend, *args: Any, **options: Any) -> Generation:
        generation = start(self, *args, **options)
        programs.append(options["program"] if args[3] is None else args[3].program)
        return generation

    monkeypatch.setattr(LocalBackend, "start", noted)
    if not keeps_branches:
        client._keeps_branches = False
    ids, params = np.array([5, 6, 7], np.int32), SamplingParams(max_new_tokens=1)
    trunk = client.open()
    client.append(trunk, [Segment("the cat")])
    running = [client.generate(branch, [], params) for branch in (trunk, client.fork(trunk), client.fork(trunk))]
    running += [client.start(ids, params, program=program) for program in (7, 7, 8)]
    running += [client.start(ids, params) for _ in range(2)]
    for generation in running:
        generation.result(60)
    assert programs[0] == programs[1] == programs[2] != programs[3] == programs[4] != programs[5]
    assert None not in programs[:6]
    assert programs[6:] == [None, None]


@pytest.mark.parametrize("is_here", [False, True])
def test_what_ends_after_its_branch_was_gone_on_with_moves_it_no_more(client: EngineClient, is_here: bool) -> None:
    """As when a client goes, comes back and goes on before it is noticed that nobody wants the text any more."""
    there = client._link
    assert isinstance(there, Loop)
    engine = there.orders._engine
    branch: ClientBranch | LocalBranch
    branch = engine.open() if is_here else client.open()
    backend = engine if is_here else client
    backend.append(branch, [Segment("the cat")])
    params = SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True)
    begun: list[Generation] = []

    def give_up() -> None:  # between two steps: nothing of the first has run when the next one comes
        first = backend.generate(branch, [Segment(" sat")], params)
        begun.append(first)
        backend.append(branch, [Segment(" on")])

    engine._between_steps(give_up)
    stood = list(branch.token_ids)
    (first,) = begun
    first.result(60)
    assert list(branch.token_ids) == stood, "the text that was appended is not lost"
    (output,) = backend.generate(branch, [Segment(" the")], params).result(60)
    fresh = client.open()
    client.append(fresh, [Segment("the cat sat on")])
    (alike,) = client.generate(fresh, [Segment(" the")], params).result(60)
    assert list(branch.token_ids)[: len(stood)] == stood
    assert output.token_ids == alike.token_ids
    assert list(branch.token_ids) == list(fresh.token_ids)


def test_who_asks_while_the_engine_is_started_again_is_refused(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first engine had of the branch was looked up before: the second has nothing of it."""
    there = client._link
    assert isinstance(there, Loop)
    branch = client.open()
    client.generate(branch, [Segment("the cat")], SamplingParams(max_new_tokens=1)).result(60)
    stood = list(branch.token_ids)
    packed = frames.packed

    def started_again(*arguments: Any) -> bytes:
        client.connect(there, frames.loaded_by(there.engine))
        return packed(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(frames, "packed", started_again)
        with pytest.raises(EngineStopped):
            client.generate(branch, [Segment(" sat")], SamplingParams(max_new_tokens=1))
    assert list(branch.token_ids) == stood
    assert client.generate(branch, [Segment(" sat")], SamplingParams(max_new_tokens=1)).result(60)


def test_a_scoring_that_fails_after_its_branch_was_gone_on_with_moves_it_no_more(client: EngineClient) -> None:
    there = client._link
    assert isinstance(there, Loop)
    branch = client.open()
    client.append(branch, [Segment("the cat")])
    failed: list[BaseException | None] = []
    stood: list[int] = []

    def give_up() -> None:  # between two steps: nothing of it has run
        scoring = client.score(branch, [Segment(" sat")], ["a", "b"])
        client.append(branch, [Segment(" on")])
        stood.extend(branch.token_ids)
        client.disconnect(EngineStopped("gone"))
        failed.append(scoring.error())

    there.orders._engine._between_steps(give_up)
    assert isinstance(failed[0], EngineStopped)
    assert list(branch.token_ids) == stood


@pytest.mark.parametrize("asks", ["generate", "score"])
@pytest.mark.parametrize("is_here", [False, True])
def test_who_closes_a_branch_while_its_text_is_tokenized_ends_what_is_about_to_run_on_it(
    client: EngineClient, is_here: bool, asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = client._link
    assert isinstance(there, Loop)
    engine = there.orders._engine
    backend = engine if is_here else client
    branch: ClientBranch | LocalBranch
    branch = engine.open() if is_here else client.open()
    backend.generate(branch, [Segment("the cat")], SamplingParams(max_new_tokens=1)).result(60)
    finished = engine.usage()["finished"]
    encode = Tokenizer.encode

    def encode_slowly(self: Tokenizer, *args: Any, **options: Any) -> list[int]:
        backend.close(branch)
        return encode(self, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", encode_slowly)
    running: Generation | Pending[Any]
    if asks == "generate":
        running = backend.generate(branch, [Segment(" sat")], SamplingParams(max_new_tokens=400, ignore_eos=True))
    else:
        running = backend.score(branch, [Segment(" sat")], ["a", "b"])
    with pytest.raises((Cancelled, ProgramError)):
        running.result(60)
    engine.check()
    assert engine._core.pages.cache.stats().pins == 0
    assert not there.orders._branches
    assert (engine.usage()["requests_running"], engine.usage()["finished"]) == (0, finished)


def test_an_order_that_names_tokens_which_its_branch_has_not_is_refused(client: EngineClient) -> None:
    """They would be left out of the prompt without a word."""
    branch = client.open()
    client.generate(branch, [Segment("the cat")], SamplingParams(max_new_tokens=1)).result(60)
    client.post(frames.Close(branch.number))
    with pytest.raises(ProgramError, match="closed"):
        client.generate(branch, [Segment(" sat")], SamplingParams(max_new_tokens=1)).result(60)


def test_an_order_that_makes_no_sense_is_told_so_and_leaves_nothing_behind(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = client._link
    assert isinstance(there, Loop)
    told: list[str] = []

    def receive(reports: Sequence[frames.Message]) -> None:
        told.extend(report.kind for report in reports if isinstance(report, frames.Failed))

    monkeypatch.setattr(client, "receive", receive)
    unknown = {frames.KIND: "Nothing"}
    there.post(frames.Start(71, 0, 0, b"abc", unknown, "", None, 0, False, 0))
    there.post(frames.Weigh(72, 73, 0, b"abc", "", 0, ("a",), False, False, 0))
    there.post(frames.RunScript(74, unknown, "", ()))
    assert told == ["GenerationError"] * 3
    assert not there.orders._running
