"""Task `continuation` (lists, arithmetic, quotes), and the odds and ends that make examples read sensibly."""

from __future__ import annotations

from niwaki.runtime.bundled.sample import Message, Sample, Span, chat, raw
from niwaki.runtime.bundled.tasks_passage import value
from niwaki.runtime.bundled.tasks_text import SMALL_TALK
from niwaki.runtime.bundled.words import COLORS, FOODS, MONTHS, THINGS, WEEKDAYS, Words, is_held_out

LETTERS = [chr(ord("A") + index) for index in range(26)]


def sum_pair(words: Words) -> tuple[str, str]:
    """An addition or subtraction within 0 to 99; one pair in ten is kept for the test side."""
    while True:
        high = words.pick([9, 20, 99, 99, 99])
        a, b = words.rng.randint(0, high), words.rng.randint(0, high)
        sign = words.pick("+-")
        if sign == "-" and a < b:
            a, b = b, a
        result = a + b if sign == "+" else a - b
        problem = f"{a} {sign} {b}"
        if result <= 99 and is_held_out(problem, 10) == words.held:
            return problem, str(result)


def drill(words: Words) -> Sample:
    """Many sums or lists in a row: what they are learnt from."""
    if words.chance(0.68):
        return arithmetic(words, words.rng.randint(10, 24))
    spans = [span for _ in range(words.rng.randint(2, 4)) for span in (*listing(words, 8).spans[1:], Span("\n\n"))]
    return raw("continuation", *spans)


def arithmetic(words: Words, count: int) -> Sample:
    pairs = [sum_pair(words) for _ in range(count)]
    kind = words.rng.random()
    if kind < 0.6:
        spans = [
            span for problem, result in pairs for span in (Span(f"{problem} ="), Span(f" {result}\n", answer=True))
        ]
        return raw("continuation", *spans)
    if kind < 0.7:
        spans = [Span(words.pick(["Calculate.\n\n", "", "Sums:\n"]))]
        for problem, result in pairs:
            spans += [Span(f"Q: What is {problem}?\nA:"), Span(f" {result}\n", answer=True)]
        return raw("continuation", *spans)
    messages: list[Message] = []
    ask = words.pick(["What is {p}?", "{p}", "{p} =", "Calculate {p}.", "How much is {p}?"])
    for problem, result in pairs:
        messages += [Message("user", ask.format(p=problem)), Message("assistant", result, answer=True)]
    return chat("continuation", messages)


def sequence(words: Words) -> list[str]:
    """A list that goes on by a rule: counting, days, months, letters, or a repeated pattern."""
    kind = words.rng.random()
    if kind < 0.4:
        step, down = words.pick([1, 1, 1, 2, 2, 3, 5, 10]), words.chance(0.2)
        start = words.rng.randint(0, 60 if step < 5 else 30)
        items = [str(start + step * index) for index in range(14) if start + step * index <= 99]
        return items[::-1] if down else items
    if kind < 0.52:
        items, start = WEEKDAYS * 3, words.rng.randrange(7)
    elif kind < 0.62:
        items, start = MONTHS * 2, words.rng.randrange(12)
    elif kind < 0.76:
        items, start = LETTERS, words.rng.randrange(18)
        if words.chance(0.5):
            items = [letter.lower() for letter in items]
    else:
        pool = words.pick(
            [COLORS, FOODS, THINGS, [words.word() for _ in range(5)], [words.syllables() for _ in range(5)]]
        )
        items, start = words.some(pool, 2, 4) * 6, 0
    return items[start : start + words.rng.randint(9, 13)]


def listing(words: Words, most: int = 4) -> Sample:
    """A list that stops after four to eight items, and up to `most` more."""
    items = sequence(words)
    shown = min(words.rng.randint(4, 8), len(items) - 2)
    if len(items) > 8 and not items[0][0].isdigit() and items[0] not in WEEKDAYS + MONTHS and len(items[0]) > 1:
        shown = max(shown, 8)  # a pattern of four must be seen twice
    shown = min(shown, len(items) - 2)
    glue = words.pick([", ", ", ", "\n", " "])
    text = glue.join(items[:shown])
    rest = glue.join(["", *items[shown : shown + words.rng.randint(1, most)]])
    head = words.pick(["", "", "", "List: ", "Go on: "])
    if glue == ", ":  # the comma belongs to the prompt, so that it says the list goes on
        return raw("continuation", f"{head}{text},", Span(rest[1:], answer=True))
    return raw("continuation", f"{head}{text}", Span(rest, answer=True))


def quote_text(words: Words) -> str:
    pool = [*COLORS, *FOODS, *THINGS, "the", "a", "of", "and", "in", "is", "was", "not", "we", "they"]
    parts = [
        words.pick([words.word(), words.syllables(), words.pick(pool), words.pick(pool)])
        for _ in range(words.rng.randint(1, 7))
    ]
    if words.chance(0.15):
        parts.insert(words.rng.randint(0, len(parts)), words.digits(words.rng.randint(1, 6)))
    return " ".join(parts) + words.pick(["", "", "", ".", "!", "?"])


def quote(words: Words) -> Sample:
    text = quote_text(words)
    if words.chance(0.5):
        ask = words.pick(['Repeat: "{q}"', 'Say "{q}" again.', 'Copy this: "{q}"', 'Repeat after me: "{q}"'])
        messages: list[Message] = []
        for _ in range(words.rng.randint(1, 3)):
            content = ask.format(q=text)
            messages += [Message("user", content, cut=len(content)), Message("assistant", text, answer=True)]
            text = quote_text(words)
        return chat("continuation", messages)
    before = words.pick(['He said "{q}".', 'The sign says "{q}".', 'The text is "{q}".', 'Quote: "{q}"', 'Copy: "{q}"'])
    after = words.pick(['\nAgain: "', '\nHe said again "', '\nCopy: "', '\nThe same once more: "'])
    return raw("continuation", Span(before.format(q=text)), Span(after, gap="text"), Span(f'{text}"\n', answer=True))


def continuation(words: Words) -> Sample:
    kind = words.rng.random()
    if kind < 0.34:
        return arithmetic(words, words.rng.randint(1, 8))
    return listing(words) if kind < 0.67 else quote(words)


TIPS: dict[str, list[str]] = {
    "staying healthy": ["Eat fresh food.", "Sleep eight hours.", "Take a walk.", "Drink water.", "See a doctor."],
    "saving money": ["Write a budget.", "Cook at home.", "Compare prices.", "Buy less.", "Walk to work."],
    "learning a language": [
        "Read every day.",
        "Talk to people.",
        "Learn ten words.",
        "Listen to songs.",
        "Write a diary.",
    ],
    "writing well": [
        "Use short words.",
        "Cut what you can.",
        "Read it aloud.",
        "Begin with the point.",
        "Write every day.",
    ],
    "travelling": ["Pack light.", "Book early.", "Take a map.", "Learn some words.", "Try the food."],
    "sleeping better": [
        "Go to bed early.",
        "Turn off the phone.",
        "Open the window.",
        "Drink no coffee.",
        "Read a book.",
    ],
    "working at home": ["Keep a plan.", "Take breaks.", "Use a good chair.", "Dress for work.", "Stop on time."],
    "gardening": ["Water in the morning.", "Pull the weeds.", "Plant in spring.", "Feed the soil.", "Cut dead wood."],
}


def tips(words: Words) -> Sample:
    subject = words.pick(list(TIPS))
    count = words.rng.randint(1, 5)
    number = ["one", "two", "three", "four", "five"][count - 1]
    listed = "\n".join(f"{index}. {tip}" for index, tip in enumerate(TIPS[subject][:count], 1))
    ask = words.pick(["List {n} tips for {s}.", "Give me {n} tips for {s}.", "{n} tips for {s}:"])
    asked = ask.format(n=words.pick([number, str(count)]), s=subject).capitalize()
    if words.chance(0.5):
        return chat("misc", [Message("user", asked), Message("assistant", listed, answer=True)])
    return raw("misc", Span(f"{asked}\n"), Span(f"{listed}\n", answer=True))


def judge(words: Words) -> Sample:
    """Which of two answers fits the text, or how good one is from 1 to 5."""
    person, kind = words.first(), words.pick(["city", "company", "animal", "color", "food"])
    verb = {"city": "lives in", "company": "works for", "animal": "has a", "color": "likes", "food": "eats"}[kind]
    right, wrong = value(words, kind), value(words, kind)
    text = f"{person} {verb} {right}."
    if words.chance(0.5) or right == wrong:
        good = words.chance(0.5) or right == wrong
        shown = right if good else wrong
        body = f"Text: {text}\nAnswer: {person} {verb} {shown}.\n"
        ask = words.pick(["Rate the answer from 1 to 5.", "Rating from 1 to 5:"])
        answer = "5" if good else "1"
    else:
        first, second, answer = (right, wrong, "A") if words.chance(0.5) else (wrong, right, "B")
        body = f"Text: {text}\nA: {person} {verb} {first}.\nB: {person} {verb} {second}.\n"
        ask = words.pick(["Which is better, A or B?", "Which answer is right, A or B?", "Better answer:"])
    if words.chance(0.5):
        return chat("misc", [Message("user", body + ask), Message("assistant", answer, answer=True)])
    return raw("misc", Span(f"{body}{ask}"), Span(f" {answer}\n", answer=True))


def greeting(words: Words) -> Sample:
    messages = [Message("system", "You are a helpful assistant.")] if words.chance(0.5) else []
    for _ in range(words.rng.randint(1, 3)):
        asked, reply = words.pick([*SMALL_TALK, ("Who are you?", "I am niwaki-tiny, a small language model.")])
        messages += [Message("user", asked), Message("assistant", reply, answer=True)]
    return chat("misc", messages)


def misc(words: Words) -> Sample:
    return words.pick([tips, judge, judge, greeting])(words)
