"""Tasks on text: `passage` questions, `classification` and multi-turn `recall`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


def plain_passage(words: Words) -> Sample:
    """From one to six facts."""
    return passage(words, most=6)


def dense_passage(words: Words) -> Sample:
    """For training: many questions a text, for the text costs more tokens than they do, and many that ask backwards
    (who lives in Bergen?), which are learnt last."""
    return passage(words, fewest_questions=4, most_questions=14, backwards=0.5)


# What may stand between a fact and the name of its subject, and after that name.
ECHOES = [(".", ". "), (":", ". "), (" ->", ". "), (",", ". "), (" =", "; "), ("\n-", "\n")]


def backward(words: Words) -> Sample:
    """For training: whom a fact is of, said again behind it, asked for by the value alone, by a question, in a form.

    Questions alone teach this hardly at all: the answer has to read at the value whom it belongs to, and nothing else
    makes a model note it there. Each step asks for it one place further from where it is noted.
    """
    step = words.rng.random()
    if step > 0.65:
        return passage(words, words.rng.randint(2, 8), 3, 10, backwards=0.9)
    facts = world(words, words.rng.randint(2, 8))
    if facts[0].subject in THINGS:  # "the" begins the names of all of them
        return backward(words)
    spans = []
    if step < 0.12:
        before, after = words.pick(ECHOES)
        for fact in facts:
            spans += [Span(fact.sentence.removesuffix(".") + before), Span(f" {fact.subject}{after}", answer=True)]
        return raw("passage", *spans)
    spans.append(Span(passage_text(words, facts) + "\n\n"))
    mark = words.pick([":", " ->", " ="])
    for fact in words.some(facts, len(facts), len(facts)):
        asking = [question for question, answer in fact.questions if answer == fact.subject]
        asked = words.pick(asking) if step > 0.35 and asking else fact.value + mark
        spans += [Span(asked), Span(f" {fact.subject}\n", answer=True)]
    return raw("passage", *spans)


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
        return raw("passage", *spans)
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
    return chat("passage", messages)


GOOD = "great good lovely excellent wonderful fantastic superb perfect brilliant amazing delightful nice".split()
BAD = "bad awful terrible poor horrible dreadful broken boring disappointing ugly rude useless".split()
ITEMS = "movie film book meal hotel phone service staff room song game show coffee trip food product app car".split()
POSITIVE = [
    "The {i} was {w}.",
    "I loved the {i}.",
    "What a {w} {i}!",
    "I enjoyed the {i}, it was {w}.",
    "The {i} is {w}.",
]
POSITIVE += [
    "We had a {w} time with the {i}.",
    "I would buy the {i} again.",
    "The best {i} in years.",
    "So happy with the {i}.",
]
NEGATIVE = [
    "The {i} was {w}.",
    "I hated the {i}.",
    "What a {w} {i}!",
    "I regret the {i}, it was {w}.",
    "The {i} is {w}.",
]
NEGATIVE += ["We had a {w} time with the {i}.", "I want my money back for the {i}.", "The worst {i} in years."]
NEGATIVE += ["Never again this {i}.", "I did not like the {i}."]
NEUTRAL = ["The {i} arrived on {d}.", "The {i} costs {p} dollars.", "The {i} is in room {p}.", "We saw the {i} on {d}."]
NEUTRAL += ["It is a {i}.", "The {i} has {p} parts.", "They sell the {i} in {c}."]
TOPICS: dict[str, list[str]] = {
    "sports": ["{n} won the match.", "The team scored {p} goals.", "The coach of {c} left.", "{n} ran the race in {c}."]
    + ["The player trained before the game.", "{c} lost the final by {p} points."],
    "food": [
        "{n} cooked {f}.",
        "The recipe needs {f}.",
        "We ate {f} in {c}.",
        "The chef baked {f}.",
        "This {f} tastes fresh.",
    ],
    "weather": [
        "It will rain in {c} on {d}.",
        "The sun shines over {c}.",
        "Snow fell in {c}.",
        "A storm hit {c} on {d}.",
    ]
    + ["It is {p} degrees and windy.", "Clouds and fog are expected."],
    "music": ["{n} sang a new song.", "The band plays in {c}.", "The concert of {n} was on {d}.", "{n} plays the {m}."]
    + ["The album has {p} songs.", "The orchestra needs a {m}."],
    "travel": ["The flight to {c} leaves on {d}.", "{n} booked a hotel in {c}.", "The train to {c} takes {p} minutes."]
    + ["Bring your passport to the airport.", "We took the ferry to {c}."],
    "money": ["The bank raised the rates.", "{n} paid {p} dollars in tax.", "Shares of {o} fell.", "{o} made a profit."]
    + ["The loan costs {p} dollars.", "The budget of {c} grew."],
    "health": ["The doctor saw {n}.", "{n} has a fever.", "The hospital in {c} opened.", "Take the pills for {p} days."]
    + ["The nurse gave {n} a vaccine.", "{n} broke a leg."],
    "technology": [
        "{o} released a new computer.",
        "The software has {p} bugs.",
        "{n} wrote the code.",
        "The chip is fast.",
    ]
    + ["The laptop needs an update.", "{o} built a robot."],
}
OTHER_NAMES = {"positive": ["good", "pos", "happy", "+", "up"], "negative": ["bad", "neg", "sad", "-", "down"]}
OTHER_NAMES["neutral"] = ["mixed", "neu", "plain", "0", "flat"]


def filled(words: Words, template: str, adjective: str = "") -> str:
    return template.format(
        i=words.pick(ITEMS),
        w=adjective,
        d=words.pick(WEEKDAYS),
        p=words.rng.randint(2, 99),
        c=words.city(),
        n=words.first(),
        f=words.pick(FOODS),
        m=words.pick(INSTRUMENTS),
        o=words.company(),
    )


def sentiment(words: Words, label: str) -> str:
    templates = {"positive": POSITIVE, "negative": NEGATIVE, "neutral": NEUTRAL}[label]
    adjective = words.pick(GOOD if label == "positive" else BAD)
    text = filled(words, words.pick(templates), adjective)
    if words.chance(0.3):
        text += " " + filled(words, words.pick(templates), words.pick(GOOD if label == "positive" else BAD))
    return text


def yes_no(words: Words) -> tuple[str, str]:
    """A text with a yes/no question; `unknown` where the text does not say."""
    subject = words.first() if words.chance(0.6) else f"the {words.pick(THINGS)}"
    thing = subject.startswith("the ")
    kinds = [
        ("{S} is {v}.", "Is {s} {v}?", "color"),
        ("{S} costs {v} dollars.", "Does {s} cost {v} dollars?", "number"),
        ("{S} is in {v}.", "Is {s} in {v}?", "city"),
    ]
    if not thing:
        kinds = [
            ("{S} lives in {v}.", "Does {s} live in {v}?", "city"),
            ("{S} works for {v}.", "Does {s} work for {v}?", "company"),
            ("{S} has a {v}.", "Does {s} have a {v}?", "animal"),
            ("{S} likes {v}.", "Does {s} like {v}?", "food"),
            ("{S} plays the {v}.", "Does {s} play the {v}?", "instrument"),
        ]
    told, asked = words.pick(kinds), words.pick(["yes", "no", "unknown"])
    right = value(words, told[2])
    text = told[0].format(S=subject[0].upper() + subject[1:], v=right)
    if asked == "yes":
        return f"{text} {told[1].format(s=subject, v=right)}", "yes"
    wrong = value(words, told[2])
    while wrong == right:
        wrong = value(words, told[2])
    if asked == "no":
        return f"{text} {told[1].format(s=subject, v=wrong)}", "no"
    if thing or words.chance(0.5):
        other = words.pick([kind for kind in kinds if kind != told])
        return f"{text} {other[1].format(s=subject, v=value(words, other[2]))}", "unknown"
    return f"{text} {told[1].format(s=words.first(), v=words.pick([right, wrong]))}", "unknown"


def classification(words: Words) -> Sample:
    kind = words.pick(["sentiment", "topic", "yesno"])
    if kind == "sentiment":
        labels = words.pick([["positive", "negative"], ["positive", "negative", "neutral"]])
    elif kind == "topic":
        labels = words.some(list(TOPICS), 2, 5)
    else:
        labels = ["yes", "no", "unknown"]
    shown = {label: label for label in labels}
    if kind == "sentiment" and words.chance(0.2):
        column = words.rng.randrange(5)
        shown = {label: OTHER_NAMES[label][column] for label in labels}

    def item() -> tuple[str, str]:
        if kind == "yesno":
            return yes_no(words)
        label = words.pick(labels)
        text = sentiment(words, label) if kind == "sentiment" else filled(words, words.pick(TOPICS[label]))
        return text, shown[label]

    listed = ", ".join(shown.values())
    told = shown != {label: label for label in labels} or words.chance(0.75)
    aim = {"sentiment": "the sentiment", "topic": "the topic", "yesno": "the answer"}[kind]
    name = words.pick(["Label", "Label", {"sentiment": "Sentiment", "topic": "Topic", "yesno": "Answer"}[kind]])
    head = words.pick([f"Classify {aim}: {listed}.", f"Labels: {listed}", f"Choose {aim} from {listed}."])
    if not told and kind == "topic":
        head = f"Labels: {listed}"
    elif not told:
        head = words.pick(["", f"Say {aim}."])
    items = [item() for _ in range(words.rng.randint(1, 6))]
    shots = words.rng.randint(0, len(items) - 1)  # shots are shown; what follows is answered
    shape = words.rng.random()
    if shape < 0.4:
        spans = [Span(f"{head}\n\n" if head else "")]
        for index, (text, label) in enumerate(items):
            spans.append(Span(f"Text: {text}\n{name}:", gap="text" if index == 0 else ""))
            spans.append(Span(f" {label}\n", answer=index >= shots or bool(head)))
            spans.append(Span(words.pick(["\n"])))
        return raw("classification", *spans)
    if shape < 0.7:  # all shots in one user turn
        lines = "".join(f"Text: {text}\n{name}: {label}\n\n" for text, label in items[:shots])
        messages = [Message("system", head)] if head and words.chance(0.5) else []
        lead = "" if messages or not head else f"{head}\n\n"
        for index, (text, label) in enumerate(items[shots:]):
            content = f"{lead}{lines}Text: {text}\n{name}:" if index == 0 else f"Text: {text}\n{name}:"
            messages += [Message("user", content), Message("assistant", label, answer=True)]
        return chat("classification", messages)
    messages = [Message("system", head)] if head else []
    for index, (text, label) in enumerate(items):
        messages.append(Message("user", text))
        messages.append(Message("assistant", label, answer=index >= shots or bool(head)))
    return chat("classification", messages)


# what the user tells, and what it is called when asked for
TOLD: list[tuple[str, str, str]] = [
    ("name", "name", "My name is {v}."),
    ("name", "first", "I am called {v}."),
    ("city", "city", "I live in {v}."),
    ("company", "company", "I work for {v}."),
    ("role", "role", "My role is {v}."),
    ("favorite color", "color", "My favorite color is {v}."),
    ("favorite food", "food", "My favorite food is {v}."),
    ("dog's name", "first", "My dog's name is {v}."),
    ("cat's name", "first", "My cat's name is {v}."),
    ("sister's name", "first", "My sister's name is {v}."),
    ("brother's name", "first", "My brother's name is {v}."),
    ("boss's name", "name", "My boss's name is {v}."),
    ("code", "code", "My code is {v}."),
    ("room", "room", "My room is {v}."),
    ("flight number", "code", "My flight number is {v}."),
    ("email", "email", "My email is {v}."),
    ("phone number", "phone", "My phone number is {v}."),
    ("order number", "code", "My order number is {v}."),
    ("age", "age", "My age is {v}."),
    ("birthday", "date", "My birthday is {v}."),
    ("sport", "sport", "My sport is {v}."),
    ("password", "first", "My password is {v}."),
    ("meeting", "day", "My meeting is on {v}."),
]
QUESTIONS = ["What is my {k}?", "What is my {k}?", "Tell me my {k}.", "Do you remember my {k}?", "And my {k}?"]
SMALL_TALK = [
    ("How are you?", "I am fine, thank you."),
    ("Thanks!", "You are welcome."),
    ("Hello", "Hello! How can I help?"),
    ("Hi!", "Hello! How can I help?"),
    ("Good morning.", "Good morning! How can I help?"),
    ("Tell me more later.", "Sure."),
    ("Wait a moment.", "Sure."),
]


def recall(words: Words) -> Sample:
    """Facts told over several turns, then asked for."""
    told = list({fact[0]: fact for fact in words.some(TOLD, 1, 5)}.values())
    known = {key: value(words, kind) for key, kind, _ in told}
    messages: list[Message] = []
    if words.chance(0.35):
        messages.append(
            Message("system", words.pick(["You are a helpful assistant.", "You remember what you are told."]))
        )
    pending = list(told)
    while pending:
        batch = [pending.pop() for _ in range(min(len(pending), words.pick([1, 1, 1, 2])))]
        said = " ".join(template.format(v=known[key]) for key, _, template in batch)
        messages += [Message("user", said), Message("assistant", "Noted.", answer=True)]
        if words.chance(0.3):
            talk, reply = words.pick(SMALL_TALK)
            messages += [Message("user", talk), Message("assistant", reply, answer=True)]
    asked = words.some(list(known), 1, 4)
    if words.chance(0.08):
        asked.insert(0, words.pick([key for key, _, _ in TOLD if key not in known]))
    for key in asked:
        answer = f"Your {key} is {known[key]}." if key in known else "You did not tell me."
        gap = "turns" if len(messages) > 1 else ""
        messages.append(Message("user", words.pick(QUESTIONS).format(k=key), gap=gap))  # type: ignore[arg-type]
        messages.append(Message("assistant", answer, answer=True))
    return chat("recall", messages)
