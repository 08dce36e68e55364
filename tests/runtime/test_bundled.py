"""niwaki-tiny: the data, the tokenizer and the template say the same thing, and the shipped folder is complete."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import jinja2.sandbox
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from niwaki.runtime.bundled import MODEL_DIR
from niwaki.runtime.bundled.batches import NO_NOTE, Encoder, Packer, batch, belongings, repeats
from niwaki.runtime.bundled.evaluate import Complete, Marker, Row, table
from niwaki.runtime.bundled.generator import MIX, TASKS, stream, stretch
from niwaki.runtime.bundled.sample import Message, Tool, chat, dumps, tool_call
from niwaki.runtime.bundled.tasks_plain import sum_pair
from niwaki.runtime.bundled.tokenizer import SPECIAL
from niwaki.runtime.bundled.trials import BEYOND, FAR_TASKS, TRIALS, questions, trials
from niwaki.runtime.bundled.words import CLOSED, OPEN, Words


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def render(
    messages: list[dict[str, object]], tools: list[dict[str, object]] | None = None, prompt: bool = False
) -> str:
    """What users of the chat template get."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, separators=None: json.dumps(
        value, ensure_ascii=False, separators=separators
    )
    config = json.loads((MODEL_DIR / "tokenizer_config.json").read_text())
    template = environment.from_string(config["chat_template"])
    return template.render(messages=messages, tools=tools, bos_token=config["bos_token"], add_generation_prompt=prompt)


def test_the_folder_is_complete_and_at_most_32_megabytes() -> None:
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert names <= {path.name for path in MODEL_DIR.iterdir()}
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 32 * 2**20


def test_the_same_seed_gives_the_same_samples() -> None:
    first = [sample.text for sample in itertools.islice(stream(3), 50)]
    assert first == [sample.text for sample in itertools.islice(stream(3), 50)]
    assert first != [sample.text for sample in itertools.islice(stream(4), 50)]


def test_training_and_test_share_no_syllable_and_no_sum() -> None:
    assert not set(OPEN[True]) & set(OPEN[False])
    assert not set(CLOSED[True]) & set(CLOSED[False])
    seen = {sum_pair(Words(random.Random(seed)))[0] for seed in range(3000)}
    assert not seen & {sum_pair(Words(random.Random(seed), held=True))[0] for seed in range(1000)}


def test_chat_samples_read_exactly_as_the_template_renders_them() -> None:
    tools = [
        Tool("get_weather", "Current weather of a city", {"city": "string", "days": "integer"}),
        Tool("now", "The time", {}),
    ]
    call = {"name": "get_weather", "arguments": {"city": "Ümla", "days": 2}}
    talk = [
        Message("user", "Weather in Ümla?"),
        Message("assistant", tool_call("get_weather", {"city": "Ümla", "days": 2}), answer=True),
        Message("tool", dumps({"sky": "rain"})),
        Message("assistant", "It is rain.", answer=True),
    ]
    shown: list[dict[str, object]] = [
        {"role": "user", "content": "Weather in Ümla?"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": '{"sky":"rain"}'},
        {"role": "assistant", "content": "It is rain."},
    ]
    schemas = [tool.schema() for tool in tools]
    system: list[dict[str, object]] = [{"role": "system", "content": "Be kind."}]
    assert chat("t", talk).text == render(shown)
    assert chat("t", talk, tools).text == render(shown, schemas)
    assert chat("t", [Message("system", "Be kind."), *talk], tools).text == render(system + shown, schemas)
    assert chat("t", [Message("system", "Be kind."), *talk]).text == render(system + shown)
    assert render(shown[:1], prompt=True).endswith("<|end|><|assistant|>")


def test_a_word_has_the_same_tokens_wherever_it_stands(tokenizer: Tokenizer) -> None:
    words = Words(random.Random(5), held=True)
    for value in [words.pick([words.name, words.city, words.company, words.email, words.date])() for _ in range(300)]:
        alone = tokenizer.encode(value, add_special_tokens=False).ids
        for before, after in (
            ("at ", "."),
            ('{"a":"', '","b":1}'),
            ("(", ")"),
            ("\n", "\n"),
            ('"', '"'),
            ("x: ", ", y"),
        ):
            ids = tokenizer.encode(before + value + after, add_special_tokens=False).ids
            start = len(tokenizer.encode(before, add_special_tokens=False).ids)
            assert ids[start : start + len(alone)] == alone, (before, value)


def test_text_survives_a_round_trip_and_special_tokens_are_single(tokenizer: Tokenizer) -> None:
    for text in ("Größe 3,5 °C — naïve 🙂\n\tx", '{"a": [1, 2]}', "  two  blanks "):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    for token in SPECIAL:
        assert tokenizer.encode(token, add_special_tokens=False).ids == [tokenizer.token_to_id(token)]
    assert tokenizer.encode("a").ids[0] == tokenizer.token_to_id("<|bos|>")


@pytest.mark.parametrize("task", TASKS)
def test_every_copied_answer_of_a_sample_can_be_found_in_its_prompt(task: str) -> None:
    for sample in itertools.islice(stream(9, {task: 1.0}), 200):
        assert any(span.answer for span in sample.spans)
        if task != "extraction" or "null" in sample.text:
            continue
        before = ""
        for span in sample.spans:
            answer = span.text.strip().removesuffix("<|end|>")
            if span.answer and answer.startswith("{"):
                assert all(str(value) in before for value in json.loads(answer).values())
            before += span.text


def test_filler_moves_the_text_away_and_changes_no_answer() -> None:
    words = Words(random.Random(2))
    for sample in itertools.islice(stream(4), 200):
        far = stretch(sample, words, 10)
        answers = [span.text for span in sample.spans if span.answer]
        assert [span.text for span in far.spans if span.answer] == answers
        assert far is sample or len(far.text) > len(sample.text) + 100


def test_rows_are_full_and_hold_whole_samples(tokenizer: Tokenizer) -> None:
    packer = Packer(tokenizer, 1, 256)
    rows = [packer.next_row(MIX) for _ in range(20)]
    made = batch(rows, 256)
    assert made.ids.shape == made.weights.shape == made.positions.shape == (20, 256)
    assert sum(len(row.ids) for row in rows) > 0.9 * made.ids.size
    for row in rows:
        assert row.ids[0] == 1
        assert all(a < b for a, b in itertools.pairwise(row.positions))


def test_repeats_weigh_only_what_can_be_known() -> None:
    row = repeats(random.Random(1), 2048, 256)
    assert len(row.ids) == len(row.weights) == 256
    seen: set[tuple[int, int]] = set()
    for index in range(1, 256):
        pair = (row.ids[index - 1], row.ids[index])
        assert row.weights[index] == 0 or pair in seen
        seen.add(pair)


def test_belongings_are_noted_with_their_owner_where_told_and_where_asked() -> None:
    row = belongings(random.Random(1), 2048, 256)
    begins, asks = row.ids[0], row.ids[0] + 1
    owner, owner_of, asked = 0, dict[int, int](), 0
    for before, token, note in zip([0, *row.ids], row.ids, row.notes, strict=False):
        if token in (begins, asks) or before == begins:
            owner = token if before == begins else owner
            assert note == NO_NOTE
        elif before == asks:
            assert note == owner_of[token]
            asked += 1
        else:
            assert note == owner
            owner_of[token] = owner
    assert len(row.ids) == len(row.notes) == 256
    assert asked > 20
    assert not any(row.weights)


def test_values_of_a_passage_are_noted_with_whom_they_are_told_of(tokenizer: Tokenizer) -> None:
    """The text stays as it was, token by token; every question backwards has its answer noted at the value."""
    samples = itertools.islice(stream(3, {"passage": 1.0}), 60)
    backwards = 0
    for sample in samples:
        parts = [id for span in sample.spans for id in tokenizer.encode(span.text, add_special_tokens=False).ids]
        assert parts == tokenizer.encode(sample.text, add_special_tokens=False).ids
        for value, asks, answer in zip(sample.spans, sample.spans[1:], sample.spans[2:], strict=False):
            if value.note and answer.answer and "?" in asks.text:
                assert answer.text.strip().removesuffix("<|end|>") == value.note
                backwards += 1
    assert backwards > 20


def test_loose_encoding_spells_json_punctuation_one_character_a_token(tokenizer: Tokenizer) -> None:
    encoder = Encoder(tokenizer, random.Random(1))
    sample = next(iter(stream(1, {"extraction": 1.0})))
    loose, tight = (encoder.row(sample, jump=False, loose=kind).ids for kind in (True, False))
    assert len(loose) > len(tight)
    assert tokenizer.decode(loose) == tokenizer.decode(tight)


@pytest.mark.parametrize("task", [*TRIALS, *BEYOND])
def test_trials_are_reproducible_and_hold_their_answer_after_the_prompt(task: str) -> None:
    made = trials(task, 20, seed=1, far=0.3)
    assert made == trials(task, 20, seed=1, far=0.3)
    assert all(prompt.startswith("<|bos|>") and expected for trial in made for prompt, expected in trial.checks)
    assert any(trial.far for trial in made) or task not in FAR_TASKS


def test_far_trials_have_their_text_1500_tokens_back(tokenizer: Tokenizer) -> None:
    for task in FAR_TASKS:
        for trial in trials(task, 10, seed=3, far=1.0):
            prompt, expected = trial.checks[-1]
            assert 1500 < len(tokenizer.encode(prompt + expected, add_special_tokens=False).ids) <= 2300


def test_a_trial_of_an_acting_task_is_one_request_or_one_trace() -> None:
    for task, opening in (("tools", "<|user|>"), ("react", "Question:")):
        for sample in itertools.islice(stream(6, {task: 1.0}), 50):
            groups = questions(sample)
            assert sum(len(group) for group in groups) == sum(span.answer for span in sample.spans)
            assert all(len({prompt.count(opening) for prompt, _ in group}) == 1 for group in groups)


def scripted(answers: dict[tuple[int, ...], list[int]]) -> Complete:
    return lambda prompts, budgets: [
        answers[tuple(prompt)][:budget] for prompt, budget in zip(prompts, budgets, strict=True)
    ]


def test_the_marker_counts_exact_answers_and_lets_no_answer_run_on(tokenizer: Tokenizer) -> None:
    asked = trials("recall", 4, seed=1)
    pairs = [trial.checks[0] for trial in asked]

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    answers = {tuple(encode(prompt)): encode(expected) for prompt, expected in pairs}
    keys = list(answers)
    answers[keys[1]] = answers[keys[1]][:-1]  # without the end token: some engines keep it to themselves
    answers[keys[2]] = [*answers[keys[2]][:-1], 300]
    answers[keys[3]] = [300, *answers[keys[3]]]
    right, wrong = Marker(tokenizer, scripted(answers)).mark(asked)
    assert right == [True, True, False, False]
    assert len(wrong) == 2


def test_a_row_falls_short_when_its_far_trials_do() -> None:
    assert Row("t", 0.96, 100, 0.95, 0.9, 10, ()).is_met  # one miss in ten
    assert not Row("t", 0.96, 100, 0.95, 0.8, 10, ()).is_met
    assert not Row("t", 0.94, 100, 0.95, 1.0, 10, ()).is_met
    assert "short" in table([Row("t", 0.94, 100, 0.95, None, 0, ())])


def test_a_run_can_begin_with_an_exported_folder() -> None:
    """What export writes from the masters that a start reads is the folder again, tensor by tensor."""
    from niwaki.runtime.bundled.network import Shape, hf_tensors, masters_of

    shipped = load_file(MODEL_DIR / "model.safetensors")
    again = hf_tensors(masters_of(shipped, Shape()), Shape())
    assert again.keys() == shipped.keys()
    assert all(bool((again[name] == tensor).all()) for name, tensor in shipped.items())


def test_the_package_names_its_folder_without_torch() -> None:
    code = "import sys, niwaki.runtime.bundled as b; assert 'torch' not in sys.modules; print(b.MODEL_DIR)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip().endswith("niwaki-tiny")
