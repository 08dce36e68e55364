"""Random traces that mix what `traces` keeps apart: branches that are appended to, forked, scored and generated from,
constraints, healing, tools, reasoning, n > 1, log-probabilities, penalties, stops, streams, priorities, namespaces;
over engines of every eviction and schedule policy, with tiers, drafts, steps ahead, small pages and few places.
Meanwhile caches are flushed, saved, loaded from damaged files, demoted, files of the disk tier torn, and steps, copies
and reads of pages fail.

python -m tests.benchmarks.mixed --count 1000 --seed 1

Three engines in four are stepped (`stepping`), so that what comes between two steps is exact; the others run on their
own threads, as users have them. Each story must be told as it is told alone by a cold engine without a cache, bit for
bit; no page may be lost.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from niwaki.radix.cache import Cache
from niwaki.radix.summary import marks_of
from niwaki.runtime.api import (
    Cancelled,
    CapacityError,
    ConfigError,
    GenerationError,
    Output,
)
from niwaki.runtime.engine import Engine
from niwaki.runtime.options.config import EVICTIONS, POLICIES
from tests.benchmarks.playing import Playing, Solo
from tests.benchmarks.stepping import Stepped, come_to_rest, let_run, wait_for_steps
from tests.benchmarks.stories import Author, Gen, Pick
from tests.toy import make_model

PAGES = (4, 16)  # tokens
PER_ENGINE = 25  # traces
NAMESPACES = ("", "", "", "b", "b/c")
KINDS = (
    "flush", "save", "load", "tear", "demote", "forward", "write_pages", "read_pages", "check", "look", "summary",
    "preempt", "preempt", "pin", "expire",
)  # fmt: skip


# -- what happens to it meanwhile -------------------------------------------------------------------------------------


class Faults(logging.Handler):
    """Steps and moves of pages fail when they are told to; what the engine logs that they do not explain is a fault."""

    OF = ("forward", "write_pages", "read_pages")

    def __init__(self, engine: Engine) -> None:
        super().__init__(logging.WARNING)
        self.runner = engine.backend._core._runner
        self.left: Counter[str] = Counter()
        self.unexplained: list[str] = []
        for name in self.OF:
            self._break(name)

    def _break(self, name: str) -> None:
        works: Callable[..., object] = getattr(self.runner, name)

        def may_fail(*given: object) -> object:
            if self.left[name] > 0:
                self.left[name] -= 1
                raise OSError(f"{name} was told to fail")
            return works(*given)

        setattr(self.runner, name, may_fail)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if record.name == "niwaki.engine" and "was told to fail" not in str(error):
            self.unexplained.append(f"{record.getMessage()}: {error!r}")


def meddle(engine: Engine, faults: Faults, folder: Path, draw: random.Random, playing: Sequence[Playing]) -> str:
    kind = draw.choice(KINDS)
    saved = folder / f"{Path(str(engine.config.model)).name}{engine.config.page_size}.cache"
    match kind:
        case "flush":
            engine.flush_cache()
        case "save":
            with suppress(OSError):
                engine.save_cache(saved)
        case "load":
            if saved.exists():
                if draw.random() < 0.3:
                    damage(saved, draw)
                with suppress(OSError, ConfigError):  # the damage may be in its first line
                    engine.load_cache(saved)
        case "tear":
            for path in sorted((folder / "disk").glob("*.page"))[: draw.randint(1, 4)]:
                with suppress(FileNotFoundError):  # the engine may delete it at any time
                    damage(path, draw)
        case "demote":
            for one in playing:
                if one.branch is not None:
                    engine.backend.demote(one.branch)
        case "check":
            engine.backend.check()
        case "look":
            engine.tree()
        case "summary":
            between_steps(engine, lambda: check_summary(engine.backend._core.pages.cache))
        case "preempt":
            between_steps(engine, lambda: preempt(engine, draw))
        case "pin":
            prompt = np.array(draw.choice(playing).known_ids(), np.int32)
            until = time.monotonic() + draw.choice((0.0, 0.005, 0.05))
            namespace = draw.choice(NAMESPACES)
            between_steps(engine, lambda: engine.backend._core.pages.cache.pin(prompt, namespace, until=until))
        case "expire":
            between_steps(engine, lambda: engine.backend._core.pages.cache.expire(time.monotonic()))
        case _:
            faults.left[kind] += 1
    return kind


def between_steps(engine: Engine, work: Callable[[], object]) -> None:
    engine.backend._between_steps(work)


def preempt(engine: Engine, draw: random.Random) -> None:
    """As where pages are short: some who run give theirs back."""
    core = engine.backend._core
    core._land_and_settle()
    running = list(core._roster.running.values())
    for request in draw.sample(running, draw.randint(0, len(running))):
        core._roster.preempt(request)


def check_summary(cache: Cache) -> None:
    """What a router is told: the marks of all that is cached, none before the one it stands on, and no others."""
    marks = cache.summary(1 << 20)
    cached = [marks_of(ids, namespace) for namespace, ids, _ in cache.paths()]
    assert set(marks) == {mark for path in cached for mark in path}, "the summary has the marks of what is cached"
    assert len(set(marks)) == len(marks), "each once"
    places = {mark: place for place, mark in enumerate(marks)}
    for path in cached:
        order = [places[mark] for mark in path]
        assert order == sorted(order), "no mark before the one it stands on"
    some = cache.summary(3)
    assert some == marks[: len(some)], "the first of them"
    assert len(some) == min(3, len(marks))


def damage(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if draw.random() < 0.5 or not content:
        del content[draw.randrange(len(content) + 1) :]
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def options_of(draw: random.Random, folder: Path, page_size: int) -> dict[str, object]:
    options: dict[str, object] = {
        "page_size": page_size,
        "kv_tokens": draw.choice((208, 256, 400)),
        "chunked_prefill_size": draw.choice((16, 24, 64)),
        "streaming_prefill_size": draw.choice((None, 16)),
        "eviction_policy": draw.choice(EVICTIONS),
        "schedule_policy": draw.choice(POLICIES),
        "max_running_requests": draw.choice((2, 5, 256)),
        "draft_tokens": draw.choice((0, 4, 16)),
        "tree_attention": draw.random() < 0.8,
        "deterministic": True,
    }
    if draw.random() < 0.6:
        options["host_cache_bytes"] = draw.choice((20_000, 60_000, 2_000_000))
    if draw.random() < 0.4:
        options |= {"disk_cache_dir": folder / "disk", "disk_cache_bytes": draw.choice((100_000, 1_000_000))}
    return options


def trace(engine: Engine, solo: Solo, author: Author, faults: Faults, folder: Path, counts: Counter[str]) -> None:
    """One trace; raises AssertionError where a story is told otherwise than alone."""
    draw = author.draw
    before = engine.stats()
    was_disturbed = False
    playing: list[Playing] = []
    for _ in range(draw.randint(3, 10)):
        action = draw.random()
        if action < 0.35 or not playing:
            stories = [author.story() for _ in range(draw.randint(1, 5))]
            stories += stories[:1] * draw.randint(0, 2)
            namespace = draw.choice(NAMESPACES)
            begun = [Playing(engine, story, namespace, draw.random() < 0.3) for story in stories]
            with suppress(CapacityError):
                for one in begun:
                    one.begin()
            playing += [one for one in begun if one.at or one.pending is not None]
        elif action < 0.5:
            for place, one in enumerate(playing):
                if one.pending is None or one.pending.is_done:
                    go_on(playing, place, counts)
        elif action < 0.55:
            go_on(playing, draw.randrange(len(playing)), counts)
        elif action < 0.68:
            one = playing.pop(draw.randrange(len(playing)))
            if one.pending is not None and draw.random() < 0.6:
                one.pending.cancel()
            if draw.random() < 0.7:
                playing.append(one.again())
            one.close()  # while it runs, perhaps
            counts["cancelled"] += 1
            was_disturbed = True
        elif action < 0.74:
            if draw.random() < 0.5:
                wait_for_forced(engine)
            for place in draw.sample(range(len(playing)), draw.randint(1, len(playing))):
                go_on(playing, place, counts, Playing.ask_again)
            was_disturbed = True
        elif action < 0.76:
            counts["late"] += draw.choice(playing).is_late()
        elif action < 0.88:
            for _ in range(draw.randint(1, 3)):
                counts[meddle(engine, faults, folder, draw, playing)] += 1
        else:
            wait_for_steps(engine, draw.randint(1, 6))
    while not all(one.is_over for one in playing):
        for place in range(len(playing)):
            go_on(playing, place, counts)
    for one in playing:
        if one.is_too_long:
            one.close()
            continue
        expected = solo(one.story)
        assert one.told == expected, f"{one.story} in {one.namespace!r}:\n{one.told}\nalone\n{expected}"
        counts["stories"] += 1
        counts["asked again"] += one.num_again
        one.close()
    after = engine.stats()
    names = ("prefilled_tokens", "cached_tokens", "generated_tokens", "finished", "failed")
    did = {name: after[name] - before[name] for name in names}
    moves = [move for one in playing for move in one.story]
    was_disturbed |= did["failed"] > 0 or any(one.is_too_long for one in playing)
    if not was_disturbed and not any(isinstance(move, Pick) for move in moves):
        is_loose = any(isinstance(move, Gen) and move.params.heal for move in moves)
        adds_up([output for one in playing for output in one.outputs], did, is_loose=is_loose)
        counts["added up"] += 1


def wait_for_forced(engine: Engine) -> None:
    """Until a token has been forced, or the engine comes to rest."""
    counters = engine.backend._core.counters
    forced = counters.forced_tokens
    let_run(engine, lambda: counters.forced_tokens > forced)


def adds_up(outputs: Sequence[Output], did: Mapping[str, float], *, is_loose: bool) -> None:
    """What the engine has counted is what it has told. `is_loose`: where prompts are healed, their last tokens were
    generated, too."""
    wanted = {
        "finished": len(outputs),
        "cached": sum(output.cached_tokens for output in outputs),
        "prompts": sum(output.prompt_tokens for output in outputs),
        "generated": sum(len(output.token_ids) for output in outputs),
    }
    counted = {
        "finished": did["finished"],
        "cached": did["cached_tokens"],
        "prompts": did["prefilled_tokens"] + did["cached_tokens"],
        "generated": did["generated_tokens"],
    }
    if is_loose:
        del wanted["generated"], wanted["prompts"]
    assert all(counted[name] == value for name, value in wanted.items()), f"counted {counted}, told {wanted}"


def go_on(
    playing: list[Playing], place: int, counts: Counter[str], step: Callable[[Playing], None] = Playing.step
) -> None:
    try:
        step(playing[place])
    except CapacityError:
        playing[place].is_too_long = True
        counts["too long"] += 1
    except (Cancelled, GenerationError) as error:
        if "told to fail" not in str(error):
            raise AssertionError(f"{playing[place].story} failed") from error
        counts["failed"] += 1
        playing[place] = playing[place].again()


def traces(count: int, seed: int) -> Iterator[tuple[int, Counter[str]]]:
    """Run them in turn over engines of many kinds; gives the number done and the counts now and then."""
    counts: Counter[str] = Counter()
    log = logging.getLogger("niwaki")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The second one soon says again what it has said: drafts come of it.
        echo = make_model(folder / "echo", seed=1, sharpness=3.0, hidden_size=8, num_hidden_layers=1)
        models = [make_model(folder / "toy", sharpness=3.0), echo]
        solos = {(model, page_size): Solo(model, page_size) for model in models for page_size in PAGES}
        done = 0
        for number in itertools.count():
            if done >= count:
                break
            draw = random.Random(f"{seed} {number}")
            model, page_size = draw.choice(models), draw.choice(PAGES)
            options = options_of(draw, folder, page_size)
            kind = Stepped if draw.random() < 0.75 else Engine
            with kind(model, **options) as engine:
                core = engine.backend._core
                core._runs_ahead = draw.random() < 0.4
                if core.pages._tiers is not None:
                    core.pages._tiers._pays = lambda name: True  # type: ignore[method-assign]  # the model is quicker
                faults = Faults(engine)
                log.addHandler(faults)
                author = Author(draw)
                for _ in range(min(PER_ENGINE, count - done)):
                    try:
                        trace(engine, solos[model, page_size], author, faults, folder, counts)
                        faults.left.clear()
                        engine.backend.check()
                        at_rest(engine)
                        assert not faults.unexplained, faults.unexplained
                    except BaseException as error:
                        where = f"trace {done} of seed {seed}, {kind.__name__} {number} of {model.name}"
                        error.add_note(f"{where}: {core._runs_ahead=}, {options}")
                        raise
                    done += 1
                log.removeHandler(faults)
                stats = engine.stats()
                for key in ("cached_tokens", "preemptions", "drafted_tokens", "forced_tokens", "tier_restored_tokens"):
                    counts[key] += int(stats.get(key, 0))
            yield done, counts
        for solo in solos.values():
            solo.close()


def at_rest(engine: Engine) -> None:
    come_to_rest(engine)
    between_steps(engine, lambda: engine.backend._core.pages.cache.expire(float("inf")))
    engine.backend.check()  # between two steps: whatever was posted before it is done
    cache = engine.backend._core.pages.cache.stats()
    assert (cache.held_pages, cache.leases, cache.pins) == (0, 0, 0), cache


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    options = parser.parse_args(argv)
    logging.getLogger("niwaki").propagate = False
    began = time.perf_counter()
    for done, counts in traces(options.count, options.seed):
        took = time.perf_counter() - began
        print(f"{done} traces in {took:.0f} s: {dict(counts)}", flush=True)
        if took > options.seconds:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
