"""Questions on a passage of facts, about whom it tells of and about what it tells."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from niwaki.runtime.bundled.sample import Message, Sample, Span, chat, raw
from niwaki.runtime.bundled.words import ANIMALS, COLORS, FOODS, INSTRUMENTS, MONTHS, SPORTS, THINGS, WEEKDAYS, Words


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence, and the questions that it answers with a short value."""

    subject: str
    kind: str
    value: str
    sentence: str
    questions: tuple[tuple[str, str], ...]  # (question, answer)


# kind -> (values, sentences, questions about the subject, questions about the value)
KINDS: dict[str, tuple[str, list[str], list[str], list[str]]] = {
    "city": (
        "city",
        ["{s} lives in {v}.", "{s} has a house in {v}.", "{s} moved to {v}.", "The home of {s} is in {v}."],
        ["Where does {s} live?", "In which city does {s} live?", "What is the city of {s}?"],
        ["Who lives in {v}?"],
    ),
    "company": (
        "company",
        ["{s} works for {v}.", "{s} works at {v}.", "{s} is employed by {v}."],
        ["Where does {s} work?", "Who does {s} work for?", "What is the company of {s}?"],
        ["Who works for {v}?", "Who works at {v}?"],
    ),
    "role": (
        "role",
        ["{s} is a {v}.", "{s} works as a {v}.", "The job of {s} is {v}."],
        ["What is the job of {s}?", "What does {s} do?", "What is the role of {s}?"],
        ["Who is a {v}?"],
    ),
    "age": (
        "age",
        ["{s} is {v} years old.", "{s} is {v}.", "{s} turned {v}."],
        ["How old is {s}?", "What is the age of {s}?"],
        ["Who is {v} years old?"],
    ),
    "color": (
        "color",
        ["{s} likes the color {v}.", "The favorite color of {s} is {v}.", "{s} loves {v}."],
        ["What color does {s} like?", "What is the favorite color of {s}?"],
        ["Who likes {v}?"],
    ),
    "pet": (
        "animal",
        ["{s} has a {v}.", "{s} owns a {v}.", "{s} keeps a {v}."],
        ["What pet does {s} have?", "Which animal does {s} own?", "What is the pet of {s}?"],
        ["Who has a {v}?", "Who owns a {v}?"],
    ),
    "food": (
        "food",
        ["{s} likes {v}.", "{s} eats {v} every day.", "The favorite food of {s} is {v}."],
        ["What does {s} like to eat?", "What is the favorite food of {s}?", "What food does {s} like?"],
        ["Who eats {v}?"],
    ),
    "sport": (
        "sport",
        ["{s} plays {v} on weekends.", "The sport of {s} is {v}.", "{s} trains {v}."],
        ["What sport does {s} do?", "What is the sport of {s}?", "Which sport does {s} play?"],
        ["Who does {v}?"],
    ),
    "instrument": (
        "instrument",
        ["{s} plays the {v}.", "{s} is learning the {v}.", "The instrument of {s} is the {v}."],
        ["What instrument does {s} play?", "What is the instrument of {s}?"],
        ["Who plays the {v}?"],
    ),
    "month": (
        "month",
        ["{s} was born in {v}.", "The birthday of {s} is in {v}."],
        ["When was {s} born?", "In which month was {s} born?", "When is the birthday of {s}?"],
        ["Who was born in {v}?"],
    ),
    "email": ("email", ["The email of {s} is {v}.", "Write to {s} at {v}."], ["What is the email of {s}?"], []),
    "phone": (
        "phone",
        ["The phone number of {s} is {v}.", "Call {s} at {v}."],
        ["What is the phone number of {s}?"],
        [],
    ),
    "boss": (
        "name",
        ["The boss of {s} is {v}.", "{s} reports to {v}."],
        ["Who is the boss of {s}?", "Who does {s} report to?"],
        ["Who reports to {v}?"],
    ),
}
THING_KINDS: dict[str, tuple[str, list[str], list[str]]] = {
    "color": ("color", ["The {s} is {v}."], ["What color is the {s}?", "What is the color of the {s}?"]),
    "owner": ("name", ["The {s} belongs to {v}.", "The owner of the {s} is {v}."], ["Who owns the {s}?"]),
    "code": ("code", ["The code of the {s} is {v}."], ["What is the code of the {s}?"]),
    "price": ("number", ["The {s} costs {v} dollars."], ["How much is the {s}?", "What does the {s} cost?"]),
    "place": ("room", ["The {s} is in room {v}."], ["In which room is the {s}?", "Where is the {s}?"]),
    "day": ("day", ["The {s} arrives on {v}."], ["When does the {s} arrive?"]),
    "maker": ("company", ["The {s} was made by {v}."], ["Who made the {s}?"]),
    "town": ("city", ["The {s} comes from {v}."], ["Where does the {s} come from?"]),
}


def value(words: Words, kind: str) -> str:
    lists = {"color": COLORS, "animal": ANIMALS, "food": FOODS, "sport": SPORTS, "instrument": INSTRUMENTS}
    lists |= {"month": MONTHS, "day": WEEKDAYS}
    if kind in lists:
        return words.pick(lists[kind])
    made: dict[str, Callable[[], str]] = {
        "city": words.city,
        "company": words.company,
        "role": words.role,
        "age": lambda: str(words.age()),
        "email": words.email,
        "phone": words.phone,
        "name": lambda: words.name() if words.chance(0.5) else words.first(),
        "first": words.first,
        "date": words.date,
        "code": lambda: words.digits(words.rng.randint(3, 6)),
        "number": lambda: str(words.rng.randint(2, 999)),
        "room": lambda: str(words.rng.randint(1, 499)),
    }
    return made[kind]()


def world(words: Words, most: int) -> list[Fact]:
    """Up to `most` facts on one to six people or things, no two with the same value."""
    found: list[Fact] = []
    used: set[str] = set()
    things = words.chance(0.25)
    subjects = words.some(THINGS, 1, 6) if things else [words.name() for _ in range(words.rng.randint(1, 6))]
    if not things and words.chance(0.5):
        subjects = list(dict.fromkeys(subject.split()[0] for subject in subjects))
    shared = words.some(list(THING_KINDS if things else KINDS), 1, 3)
    for subject in subjects:
        kinds = shared if words.chance(0.6) else words.some(list(THING_KINDS if things else KINDS), 1, 3)
        for kind in kinds[: 3 if len(subjects) < 4 else 2]:
            source, sentences, about, *back = (THING_KINDS if things else KINDS)[kind]
            chosen = value(words, source)
            if chosen in used:
                continue
            used.add(chosen)
            questions = [(question.format(s=subject), chosen) for question in about]
            name = f"the {subject}" if things else subject
            questions += [(question.format(v=chosen), name) for group in back for question in group]
            found.append(
                Fact(subject, kind, chosen, words.pick(sentences).format(s=subject, v=chosen), tuple(questions))
            )
    words.rng.shuffle(found)
    return found[:most]


def unanswerable(words: Words, facts: list[Fact]) -> tuple[str, str]:
    """A question on someone who is not in the passage, or on what it does not say."""
    things = facts[0].kind in THING_KINDS and facts[0].subject in THINGS
    kinds = THING_KINDS if things else KINDS
    subject = words.pick([fact.subject for fact in facts])
    known = {fact.kind for fact in facts if fact.subject == subject}
    free = [kind for kind in kinds if kind not in known]
    if words.chance(0.5) and not things:
        subject, free = words.first(), list(kinds)
    return words.pick(kinds[words.pick(free)][2]).format(s=subject), "unknown"


def ask(words: Words, facts: list[Fact], count: int, backwards: float = 0.0) -> list[tuple[str, str]]:
    """Questions with their answers; the share `backwards` asks whom or what a value is told of, where one can."""
    asked: dict[str, str] = {}
    for _ in range(count):
        if words.chance(0.12):
            question, answer = unanswerable(words, facts)
        else:
            fact = words.pick(facts)
            back = [(question, answer) for question, answer in fact.questions if answer != fact.value]
            goes_back = bool(backwards and back) and words.chance(backwards)
            question, answer = words.pick(back if goes_back else fact.questions)
        asked[question] = answer
    return list(asked.items())


QA_SYSTEMS = ["Answer from the context.", "You answer questions about a text.", "Answer in a few words."]
QA_SYSTEMS += ["Use only the context. Say unknown if it does not tell."]


def passage_text(words: Words, facts: list[Fact]) -> str:
    kind = words.rng.random()
    if kind < 0.6:
        return " ".join(fact.sentence for fact in facts)
    if kind < 0.8:
        return "\n".join(f"[{number}] {fact.sentence}" for number, fact in enumerate(facts, 1))
    return "\n".join(f"- {fact.sentence}" for fact in facts)


def noted(sample: Sample, facts: list[Fact]) -> Sample:
    """At every value, in the text and in questions, the network is to have in mind whom it is told of.

    Questions backwards (who lives in Bergen?) are hardly learnt from their answers alone: nothing else makes a model
    note at a value whom it belongs to, and none looks for what is not there.
    """
    owners = {fact.value: fact.subject for fact in facts if fact.subject not in THINGS}
    if not owners:  # "the" begins the names of all things
        return sample
    values = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, sorted(owners, key=len, reverse=True)))})(?!\w)")
    spans: list[Span] = []
    for span in sample.spans:
        if span.answer:
            spans.append(span)
            continue
        parts = [Span(part, note=owners.get(part, "")) for part in values.split(span.text) if part]
        spans += [replace(parts[0], gap=span.gap), *parts[1:]]
    return Sample(sample.task, tuple(spans))


def plain_passage(words: Words) -> Sample:
    """From one to six facts."""
    return passage(words, most=6)


def dense_passage(words: Words) -> Sample:
    """For training: many questions a text, for the text costs more tokens than they do, and many that ask backwards
    (who lives in Bergen?), which are learnt last."""
    return passage(words, fewest_questions=4, most_questions=14, backwards=0.5)


def passage(
    words: Words, most: int = 12, fewest_questions: int = 1, most_questions: int = 10, backwards: float = 0.0
) -> Sample:
    facts = world(words, most)
    text = passage_text(words, facts)
    questions = ask(words, facts, words.rng.randint(fewest_questions, most_questions), backwards)
    label = words.pick(["Context", "Context", "Passage", "Text"])
    if words.chance(0.5):
        glue = words.pick(["\n", " "])
        head = words.pick(["", "", "Answer the question from the context.\n\n", "Use the context to answer.\n\n"])
        spans = [Span(f"{head}{label}:{glue}{text}")]
        for index, (question, answer) in enumerate(questions):
            spans.append(
                Span(f"\n{'' if index else words.pick(['', chr(10)])}Question: {question}\nAnswer:", gap="text")
            )
            spans.append(Span(f" {answer}\n", answer=True))
        return noted(raw("passage", *spans), facts)
    messages = [Message("system", words.pick(QA_SYSTEMS))] if words.chance(0.5) else []
    shape = words.pick(["{label}:\n{text}{cut}\nQuestion: {question}", "{text}{cut}\n\n{question}"])
    shape = words.pick([shape, shape, "{label}:\n{text}{cut}\n\nQuestion: {question}\nAnswer:"])
    for index, (question, answer) in enumerate(questions):
        if index == 0:
            content = shape.format(label=label, text=text, question=question, cut="\0")
            cut = content.index("\0")
            messages.append(Message("user", content.replace("\0", ""), cut=cut))
        else:
            content = f"Question: {question}" if "Question" in shape and words.chance(0.5) else question
            messages.append(Message("user", content, gap="turns"))
        messages.append(Message("assistant", answer, answer=True))
    return noted(chat("passage", messages), facts)
