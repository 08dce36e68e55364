"""A program gives the same on a server as on an engine in process, sends only what is new, and leaves nothing there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import httpx2
import pytest

import niwaki as nw
from niwaki.lang.backends import Host
from niwaki.lang.program import Program
from niwaki.lang.remote import RuntimeEndpoint
from niwaki.lang.remote_link import KEEP_ALIVE
from niwaki.lang.state import State
from niwaki.runtime.api import Generation, Message, Regex, SamplingOptions, Segment
from niwaki.runtime.engine import Engine
from niwaki.runtime.server.branches import Branches
from niwaki.runtime.server.config import ServerConfig, digests
from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.server.serve import serving
from tests.lang.waiting import PATIENCE, wait_until
from tests.runtime.server.conftest import held, nobody_waits

Values: TypeAlias = dict[str, object]


@pytest.fixture(scope="module")
def endpoint(url: str) -> Iterator[RuntimeEndpoint]:
    with RuntimeEndpoint(url) as made:
        yield made


@nw.function
def talk(s: State) -> None:
    s += nw.system("the cat") + nw.user("sat on <|end|> the mat?")
    s += nw.assistant(nw.gen("first", max_new_tokens=6, temperature=0))
    s += nw.user("and the dog?")
    s += nw.assistant(nw.gen("second", max_new_tokens=6, temperature=1.5, seed=5))


@nw.function
def choose(s: State) -> None:
    s += "the cat sat on the "
    s += nw.select("where", choices=["mat", "log", "naïve café"])
    s += " and "
    s += nw.gen("number", dtype=int, temperature=0, max_new_tokens=6)
    s += nw.gen("code", regex="[ab]{3}-[0-9]{2}", temperature=0)


@nw.function
def branch_out(s: State) -> None:
    s += "the cat and the dog and the "
    forks = s.fork(4)
    forks += lambda i: f"{i} "
    forks += nw.gen("word", max_new_tokens=5, temperature=0, ignore_eos=True)
    forks.join()
    s += nw.gen("end", max_new_tokens=3, temperature=0, n=2, return_logprob=True, top_logprobs_num=2)


def values(program: Program, backend: Host) -> Values:
    state = program.run(options={"backend": backend})
    state.sync()
    names = {"talk": ["first", "second"], "choose": ["where", "number", "code"], "branch_out": ["word", "end"]}
    return {name: state[name] for name in names[program.name]} | {"text": state.text(), "ids": list(state.token_ids)}


@pytest.mark.parametrize("program", [talk, choose, branch_out], ids=lambda program: program.name)
def test_a_program_gives_the_same_there_as_here(program: Program, endpoint: RuntimeEndpoint, engine: Engine) -> None:
    assert values(program, endpoint) == values(program, engine)


def test_a_token_that_a_program_cuts_is_healed_there_as_here(bundled_engine: Engine) -> None:
    def told(backend: Host, *, heal: bool) -> tuple[object, list[int]]:
        @nw.function
        def cut(s: State) -> None:
            s += 'Lena is a nurse.\n\nFields: name, role\nJSON: {"name":'  # `":"` is one token
            s += nw.gen("rest", max_new_tokens=4, temperature=0, heal=heal)

        state = cut.run(options={"backend": backend})
        return state["rest"], list(state.token_ids)

    with serving(bundled_engine) as url, RuntimeEndpoint(url) as endpoint:
        healed, kept = (told(endpoint, heal=heal) for heal in (True, False))
    assert healed == told(bundled_engine, heal=True)
    assert kept == told(bundled_engine, heal=False)
    assert healed[1] != kept[1]


def test_what_generations_tell_beside_their_text_comes_along(endpoint: RuntimeEndpoint, engine: Engine) -> None:
    def told(backend: Host) -> list[object]:
        meta = branch_out.run(options={"backend": backend}).get_meta_info("end")
        return [meta["completion_tokens"], meta["finish_reason"], meta["prompt_tokens"]]

    assert told(endpoint) == told(engine)
    options = SamplingOptions(
        temperature=0.0, return_logprob=True, top_logprobs_num=2, constraint=Regex("abc, [a-z]{3}")
    )
    params = options.resolve()
    outputs = []
    for backend in (endpoint, engine.backend):
        branch = backend.open()
        (output,) = backend.generate(branch, [Segment("the cat")], params).result(60)
        outputs.append(output)
        backend.close(branch)
    there, here = outputs
    assert there.token_ids == here.token_ids
    assert [one.token_id for one in there.logprobs] == [one.token_id for one in here.logprobs]
    assert [one.logprob for one in there.logprobs] == pytest.approx([one.logprob for one in here.logprobs], abs=1e-4)
    assert [len(top) for top in there.top_logprobs] == [2] * len(there.token_ids)
    assert (there.forced, there.forced_spans) == (here.forced, here.forced_spans)
    assert here.forced_spans
    assert there.allowed == here.allowed
    assert max(count or 0 for count in here.allowed) > 1


def test_a_prefix_is_computed_once_for_all_forks_of_a_remote_program(endpoint: RuntimeEndpoint, engine: Engine) -> None:
    engine.flush_cache()

    @nw.function
    def wide(s: State) -> None:
        s += "a long shared prefix of the cat and the dog " * 8
        forks = s.fork(6)
        forks += nw.gen("x", max_new_tokens=2, ignore_eos=True)
        forks.join()

    before = endpoint.usage()["prefilled_tokens"]
    state = wide.run(options={"backend": endpoint})
    state.sync()
    prefix = len(state.token_ids)
    assert endpoint.usage()["prefilled_tokens"] - before < 1.5 * prefix


def test_text_streams_from_the_server(endpoint: RuntimeEndpoint, engine: Engine) -> None:
    params = SamplingOptions(max_new_tokens=30, temperature=0.0, ignore_eos=True).resolve()
    branch = endpoint.open()
    with held(engine) as release:
        generation = endpoint.generate(branch, [Segment("the")], params)
        deltas = generation.deltas(60)
        begun = next(deltas).text
        assert not generation.is_done
        release()
        assert begun + "".join(delta.text for delta in deltas) == generation.result()[0].text
    endpoint.close(branch)


@pytest.mark.parametrize("streams", [True, False])
def test_a_remote_program_is_a_reader_where_somebody_reads_it(
    endpoint: RuntimeEndpoint, engine: Engine, started: list[Generation], streams: bool
) -> None:
    """Others' prompts make way for whoever reads, and each piece costs both sides something."""
    with held(engine, steps=1) as release, ThreadPoolExecutor(1) as pool:
        if not streams:
            release()
        state = talk.run(options={"backend": endpoint, "stream": streams})
        if streams:
            read = pool.submit(lambda: "".join(state.text_iter()))
            wait_until(lambda: bool(started and started[0].is_read))  # else it may be over before anybody reads
            release()
            assert read.result() == state.text()
        state.sync()
    assert [(bool(one.is_streamed), one.is_read) for one in started] == [(streams, streams)] * 2
    assert state.text() == values(talk, engine)["text"]


def test_who_begins_to_read_while_it_runs_hears_all_of_it(endpoint: RuntimeEndpoint, engine: Engine) -> None:
    params = SamplingOptions(max_new_tokens=30, temperature=0.0, ignore_eos=True).resolve()
    branch = endpoint.open()
    with held(engine, steps=4) as release:
        generation = endpoint.generate(branch, [Segment("the")], params)
        wait_until(lambda: bool(engine.stats()["requests_running"]))
        assert not generation.deltas_from(0)
        deltas = generation.deltas(60)
        begun = next(deltas)
        assert not generation.is_done
        release()
        told = [begun, *deltas]
    assert "".join(delta.text for delta in told) == generation.result()[0].text
    assert [one for delta in told for one in delta.token_ids] == list(generation.result()[0].token_ids)
    endpoint.close(branch)


def test_listening_to_a_branch_on_which_nothing_runs_does_nothing(endpoint: RuntimeEndpoint) -> None:
    branch = endpoint.open()
    endpoint._listen(branch.id)
    endpoint.close(branch)
    endpoint._listen(branch.id)


def test_errors_are_those_of_an_engine(endpoint: RuntimeEndpoint, engine: Engine) -> None:
    cases: list[tuple[SamplingOptions, type[Exception]]] = [
        (SamplingOptions(max_new_tokens=5000), nw.CapacityError),
        (SamplingOptions(constraint=Regex("a{3")), nw.ConstraintError),
        (SamplingOptions(stop_regex="a{3"), nw.ConstraintError),
        (SamplingOptions(stop_token_ids=[400]), nw.RequestError),
    ]
    for options, kind in cases:
        branch = endpoint.open()
        with pytest.raises(kind):
            endpoint.generate(branch, [Segment("the")], options.resolve()).result(60)
        endpoint.close(branch)
    with pytest.raises(nw.ProgramError, match="roles"):
        endpoint.render([Message("nobody", "x")], add_generation_prompt=True)
    with pytest.raises(nw.ProgramError, match="another backend"):
        endpoint.fork(engine.backend.open())


def test_cancelling_here_stops_the_work_there(endpoint: RuntimeEndpoint, client: httpx2.Client, engine: Engine) -> None:
    params = SamplingOptions(max_new_tokens=480, temperature=0.0, ignore_eos=True).resolve()
    branch = endpoint.open()
    before = engine.stats()["generated_tokens"]
    with held(engine):
        generation = endpoint.generate(branch, [Segment("the")], params)
        next(generation.deltas(60))
        generation.cancel()
        with pytest.raises(nw.Cancelled):
            generation.result(60)
        wait_until(lambda: nobody_waits(client))
    wait_until(lambda: not engine.stats()["requests_running"])
    assert engine.stats()["generated_tokens"] - before < 16
    endpoint.close(branch)
    endpoint.close(branch)  # twice is allowed


def test_a_busy_branch_takes_no_second_call_and_a_foreign_one_is_not_there(engine: Engine) -> None:
    config = ServerConfig(port=0, key_digests=digests(["key-of-ann", "key-of-bob"]))
    params = SamplingOptions(max_new_tokens=450, temperature=0.0, ignore_eos=True).resolve()
    with (
        serving(engine, config) as url,
        RuntimeEndpoint(url, api_key="key-of-ann") as ann,
        RuntimeEndpoint(url, api_key="key-of-bob") as bob,
        httpx2.Client(base_url=url, headers={"authorization": "Bearer key-of-ann"}, timeout=60) as client,
        held(engine) as release,
    ):
        branch = ann.open()
        generation = ann.generate(branch, [Segment("the")], params)
        next(generation.deltas(60))
        second = client.post(f"/branches/{branch.id}/append", json={"delta": []})
        ann.close(branch)  # what runs on it is cancelled
        release()
        with pytest.raises(nw.Cancelled):
            generation.result(60)
        assert second.status_code == 409
        own = ann.open()
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/fork")):
            with pytest.raises(nw.RequestError, match=r"no such branch.*; run the program again"):
                bob._link.call(method, f"/branches/{own.id}{path}", {"delta": []} if path else None)
        assert ann.token_ids(own) == []
        assert bob.info().model == "toy"
        with RuntimeEndpoint(url) as nobody, pytest.raises(nw.RequestError, match="API key"):
            nobody.info()


def test_no_key_takes_all_branches_that_the_others_need(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("niwaki.runtime.server.branches.MAX_BRANCHES", 4)
    config = ServerConfig(port=0, key_digests=digests(["key-of-ann", "key-of-bob"]))
    with (
        serving(engine, config) as url,
        RuntimeEndpoint(url, api_key="key-of-ann") as ann,
        RuntimeEndpoint(url, api_key="key-of-bob") as bob,
    ):
        first, second = ann.open(), ann.open()
        with pytest.raises(nw.EngineStopped, match="2 branches of this key are open already"):
            ann.open()
        with pytest.raises(nw.EngineStopped, match="2 branches of this key are open already"):
            ann.fork(first)
        ours = [bob.open(), bob.open()]
        ann.close(second)
        ours.append(ann.open())
        with pytest.raises(nw.EngineStopped, match="branches are open already"):
            bob.open()
    with serving(engine) as url, RuntimeEndpoint(url) as anybody:
        for _ in range(4):
            anybody.open()


@pytest.mark.parametrize("what", ["append", "fork"])
def test_no_branch_holds_more_than_the_context_does(url: str, what: str) -> None:
    """A fork of it costs a few bytes to ask for, and would hold all of its tokens."""
    with httpx2.Client(base_url=url) as client:
        path = f"/branches/{client.post('/branches', json={}).json()['id']}"
        client.post(f"{path}/append", json={"delta": [{"text": "the cat"}]})
        before = client.get(path).json()
        refused = client.post(f"{path}/{what}", json={"delta": [{"text": " sat" * 4000}]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert client.get(path).json() == before
        assert client.post(f"{path}/{what}", json={"delta": [{"text": " sat"}]}).status_code == 200
        client.delete(path)


def test_branches_that_nobody_uses_expire(engine: Engine) -> None:
    async def run() -> None:
        branches = Branches(engine.backend, idle_seconds=0.05)
        branch, used = engine.backend.open(), engine.backend.open()
        busy = branches.take(branches.hold(used, b""), b"")
        branch_id = branches.hold(branch, b"")
        branches.give_back(branches.take(branch_id, b""))
        async with asyncio.timeout(PATIENCE):
            while len(branches) > 1:
                await asyncio.sleep(0.01)
            assert branch.is_closed
            assert not used.is_closed, "a call uses it still"
            branches.give_back(busy)
            while len(branches):
                await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="no such branch"):
            branches.find(branch_id, b"")
        branches.close_all()

    asyncio.run(run())


def test_a_server_without_tls_is_told_from_one_that_is_gone(url: str) -> None:
    with pytest.raises(nw.EngineStopped, match=r"cannot be reached: SSL.*; does it speak plain http\?"):
        RuntimeEndpoint(url.replace("http:", "https:"), timeout=5).info()


def test_the_system_watches_whether_the_other_machine_is_there(url: str) -> None:
    """A long call has no limit of its own, and a machine that is switched off says nothing."""
    with RuntimeEndpoint(url) as endpoint:
        endpoint.info()
        (connection,) = endpoint._link._idle
        assert connection.sock is not None
        assert connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        for name, value in KEEP_ALIVE.items():
            assert connection.sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value


def test_a_server_that_is_gone_is_told_at_once() -> None:
    with pytest.raises(nw.EngineStopped, match="cannot be reached"):
        RuntimeEndpoint("http://127.0.0.1:9", timeout=5).info()
    with pytest.raises(nw.ConfigError, match="no server's address"):
        RuntimeEndpoint("127.0.0.1:30000")


def test_the_cache_is_flushed_and_the_server_described_from_afar(endpoint: RuntimeEndpoint) -> None:
    assert endpoint.flush_cache()
    assert endpoint.get_server_info()["model"] == "toy"
    assert endpoint.info().context_length == 512


def test_more_choices_than_a_server_takes_are_told_as_choices(endpoint: RuntimeEndpoint) -> None:
    @nw.function
    def choose_much(s: State) -> None:
        s += "the "
        s += nw.select("which", choices=[f"cat {number}" for number in range(5000)])

    with pytest.raises(nw.NiwakiError, match="a server takes at most 4096 choices of one select, got 5000"):
        choose_much.run(backend=endpoint)["which"]
