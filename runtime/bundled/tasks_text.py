"""Tasks on text: `classification` and multi-turn `recall`."""

from __future__ import annotations

from niwaki.runtime.bundled.sample import Message, Sample, Span, chat, raw
from niwaki.runtime.bundled.tasks_passage import value
from niwaki.runtime.bundled.words import FOODS, INSTRUMENTS, THINGS, WEEKDAYS, Words

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
