"""Task `extraction`: a person's facts out of prose, mails, signatures, notes and lists, as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from niwaki.runtime.bundled.sample import Json, Message, Sample, Span, chat, dumps, raw
from niwaki.runtime.bundled.words import SUFFIXES, WEEKDAYS, Words, filler

FIELDS = ["name", "age", "city", "company", "role", "email", "phone", "date"]

# What may be said of each field in prose; {v} is the value, {n} how the person is called at that place.
PROSE: dict[str, list[str]] = {
    "age": ["{n} is {v} years old.", "{n} is {v}.", "{n} turned {v} last month.", "{n} is a {v}-year-old.", "Age: {v}."]
    + ["At {v}, {n} still runs every day.", "{n} was born {v} years ago."],
    "city": ["{n} lives in {v}.", "{n} is based in {v}.", "{n} comes from {v}.", "Home for {n} is {v}."]
    + [
        "{n} moved to {v} last year.",
        "The office of {n} is in {v}.",
        "You can meet {n} in {v}.",
        "{n} has a flat in {v}.",
    ],
    "company": ["{n} works for {v}.", "{n} works at {v}.", "{n} joined {v} two years ago.", "The employer is {v}."]
    + [
        "{v} pays the bills of {n}.",
        "{n} is with {v}.",
        "{n} has a job at {v}.",
        "{n} runs {v}.",
        "{n} represents {v}.",
    ],
    "role": [
        "{n} works as a {v}.",
        "{n} is a {v}.",
        "{n} is the {v}.",
        "The role of {n} is {v}.",
        "{n} was hired as {v}.",
    ]
    + ["{n} has been a {v} for years.", "{n} is a {v} by profession.", "{n} serves as {v}."],
    "email": ["Write to {v}.", "The email is {v}.", "{n} can be reached at {v}.", "Send mail to {v}.", "Email: {v}."]
    + ["Mails go to {v}, please.", "{n} answers mails at {v}.", "Contact: {v}.", "{n} uses the address {v}."],
    "phone": ["Call {v}.", "The phone number is {v}.", "{n} can be called at {v}.", "Phone: {v}.", "Tel. {v}."]
    + ["Ring {n} under {v}.", "{n} picks up at {v}.", "The number of {n} is {v}.", "Text {n} on {v}."],
    "date": ["{n} starts on {v}.", "The meeting is on {v}.", "We met {n} on {v}.", "{n} signed up on {v}."]
    + [
        "The contract began on {v}.",
        "Date: {v}.",
        "{n} arrives {v}.",
        "An interview took place on {v}.",
        "Due by {v}.",
    ],
}
PAIRS: list[tuple[str, str, str]] = [
    ("role", "company", "{n} is {0} at {1}."),
    ("role", "company", "{n} works as {0} for {1}."),
    ("role", "city", "{n} is a {0} from {1}."),
    ("age", "city", "{n}, {0}, lives in {1}."),
    ("age", "city", "{n} is {0} and lives in {1}."),
    ("company", "city", "{n} works for {0} in {1}."),
    ("company", "city", "{n} joined {0} ({1})."),
    ("age", "role", "{n} is a {0}-year-old {1}."),
    ("email", "phone", "Reach {n} at {0} or {1}."),
    ("email", "phone", "Contact: {0}, {1}."),
    ("company", "date", "{n} started at {0} on {1}."),
    ("city", "date", "{n} comes to {0} on {1}."),
    ("date", "phone", "Please call {n} on {0} at {1}."),
]
OPENINGS = [
    "{v} wrote to us.",
    "{v} called today.",
    "I spoke with {v}.",
    "This is about {v}.",
    "Meet {v}.",
    "Name: {v}.",
]
OPENINGS += [
    "We talked to {v}.",
    "A note on {v}.",
    "{v} is new here.",
    "My contact there is {v}.",
    "{v} sent a request.",
]
SELF = {
    "name": ["My name is {v}.", "I am {v}.", "This is {v}.", "{v} here.", "I'm {v}.", "It is {v} again."],
    "age": ["I am {v} years old.", "I'm {v}.", "I just turned {v}."],
    "city": ["I live in {v}.", "I'm based in {v}.", "I am writing from {v}.", "I moved to {v}."],
    "company": ["I work for {v}.", "I work at {v}.", "I am with {v}.", "Our company is {v}.", "I represent {v}."],
    "role": ["I am a {v}.", "I work as a {v}.", "I'm the {v}.", "My role is {v}.", "My job: {v}."],
    "email": [
        "My email is {v}.",
        "Write to me at {v}.",
        "Mail me: {v}.",
        "You can reach me at {v}.",
        "Please use {v}.",
    ],
    "phone": ["My number is {v}.", "Call me at {v}.", "My phone is {v}.", "Ring me on {v}.", "Mobile: {v}."],
    "date": [
        "I can start on {v}.",
        "Can we meet on {v}?",
        "I arrive on {v}.",
        "Let us talk on {v}.",
        "I signed on {v}.",
    ],
}
LABELS: dict[str, list[str]] = {
    "name": ["Name", "Full name", "Contact", "Client", "Customer", "Person", "From", "name"],
    "age": ["Age", "age", "Age (years)"],
    "city": ["City", "Town", "Location", "Based in", "city", "Office", "Place"],
    "company": ["Company", "Firm", "Employer", "Organisation", "company", "Org", "Works at"],
    "role": ["Role", "Title", "Position", "Job", "role", "Job title", "Function"],
    "email": ["Email", "E-mail", "Mail", "email", "e", "EMAIL"],
    "phone": ["Phone", "Tel", "Mobile", "phone", "Cell", "T", "Tel.", "Ph"],
    "date": ["Date", "Start", "Meeting", "date", "Since", "Due", "Appointment", "Start date"],
}
NOISE = [
    "Thanks for the coffee.",
    "The invoice {r} is paid.",
    "Order {r} was sent.",
    "The weather was fine.",
    "Talk soon!",
]
NOISE += [
    "See ticket {r}.",
    "We like the plan.",
    "Parking is free.",
    "The price is {r} dollars.",
    "Nothing else to report.",
]
NOISE += [
    "Lunch is at 12:30.",
    "Please find the file attached.",
    "Room {r} is booked.",
    "Sorry for the delay.",
    "All good.",
]
BYES = [
    "Best,",
    "Best regards,",
    "Thanks,",
    "Cheers,",
    "Kind regards,",
    "Regards,",
    "Yours,",
    "Bye,",
    "--",
    "Sincerely,",
]
HELLOS = ["Hi,", "Hello,", "Hi {o},", "Hello {o},", "Dear {o},", "Hi team,", "Good morning,", "Hey,", "Dear team,"]

ASKS = [
    "{text}\n\nFields: {keys}",
    "{text}\nFields: {keys}",
    "{text}\n\nExtract {keys} as JSON.",
    "{text}\n\nReturn JSON with keys {keys}.",
    "{text}\n\nGive me {keys} as JSON.",
    "{text}\n\nKeys: {keys}",
    "{text}\n\nJSON fields: {keys}",
    "Text: {text}\nFields: {keys}",
]
ASKS_BEFORE = [
    "Extract {keys} as JSON.\n\n{text}",
    "Fields: {keys}\n\n{text}",
    "Fields: {keys}\nText: {text}",
    "Extract {keys} from the text as JSON.\n\nText: {text}",
    "Return JSON with keys {keys}.\n\n{text}",
]
ASKS_AGAIN = ["Fields: {keys}", "Fields: {keys}", "Now {keys}.", "Extract {keys} as JSON.", "And {keys}?"]
SYSTEMS = [
    "You extract facts as JSON.",
    "Extract the fields as JSON.",
    "You turn text into JSON.",
    "Answer with JSON only.",
]


@dataclass(frozen=True, slots=True)
class Record:
    """What is true of the person; fields that the text leaves out are missing."""

    values: dict[str, Json]
    text: str
    cut: int  # where filler may be put without parting a sentence

    def answer(self, keys: list[str]) -> str:
        return dumps({key: self.values.get(key) for key in keys})


def facts(words: Words, present: list[str]) -> dict[str, Json]:
    name, company = words.name(), words.company()
    if words.chance(0.12):
        name = name.split()[0]
    made: dict[str, Json] = {
        "name": name,
        "age": words.age(),
        "city": words.city(),
        "company": company,
        "role": words.role(),
        "email": words.email(name, company) if words.chance(0.75) else words.email(),
        "phone": words.phone(),
        "date": words.pick([*WEEKDAYS, "tomorrow", "next week"]) if words.chance(0.1) else words.date(),
    }
    return {field: made[field] for field in present}


def record(words: Words, plain: bool = False) -> Record:
    """Any kind of text; `plain`: one to four sentences."""
    present = words.some(FIELDS[1:], 1, 3 if plain else 6)
    if words.chance(0.96):
        present.append("name")
    values = facts(words, present)
    shape = 0.0 if plain else words.rng.random()
    if shape < 0.42:
        text = prose(words, values)
    elif shape < 0.6:
        text = mail(words, values)
    elif shape < 0.72:
        text = signature(words, values)
    elif shape < 0.86:
        text = listing(words, values)
    else:
        text = note(words, values)
    return Record(values, text, len(text))


def called(words: Words, values: dict[str, Json]) -> str:
    """How the text goes on naming the person."""
    kind = words.rng.random()
    if "name" in values and kind < 0.35:
        return str(values["name"]).split()[0]
    return words.pick(["He", "She"])


def fit(sentence: str) -> str:
    """`He` inside a sentence becomes `him` (`he` where it is the subject)."""
    for subject, inside in (("He", "him"), ("She", "her")):
        sentence = sentence.replace(f" {subject} still", f" {subject.lower()} still")
        sentence = sentence.replace(f" {subject} ", f" {inside} ").replace(f" {subject}.", f" {inside}.")
    return sentence


def prose(words: Words, values: dict[str, Json]) -> str:
    left = [field for field in values if field != "name"]
    words.rng.shuffle(left)
    first_person = words.chance(0.25)
    sentences: list[str] = []
    name = values.get("name")
    later = called(words, values)
    subject = later
    must = False  # the name itself is still to be told
    if name is None:
        pass
    elif first_person:
        sentences.append(words.pick(SELF["name"]).format(v=name))
    elif words.chance(0.4):
        sentences.append(words.pick(OPENINGS).format(v=name))
    else:
        subject, must = str(name), True
    while left:
        field = left.pop()
        pairs = [pair for pair in PAIRS if field in pair[:2] and (set(pair[:2]) - {field}) <= set(left)]
        pairs = [pair for pair in pairs if "{n}" in pair[2] or not must]
        if first_person:
            sentences.append(words.pick(SELF[field]).format(v=values[field]))
        elif pairs and words.chance(0.5):
            one, two, template = words.pick(pairs)
            left = [other for other in left if other not in (one, two)]
            sentences.append(fit(template.format(values[one], values[two], n=subject)))
        else:
            naming = [template for template in PROSE[field] if "{n}" in template]
            template = words.pick(naming if must else PROSE[field])
            sentences.append(fit(template.format(n=subject, v=values[field])))
        subject, must = later, False
        if words.chance(0.08):
            sentences.append(words.pick(NOISE).format(r=words.rng.randint(100, 9999)))
    return words.pick([" ", " ", " ", "\n"]).join(sentences)


def mail(words: Words, values: dict[str, Json]) -> str:
    name = values.get("name")
    body_fields = [field for field in values if field != "name"]
    words.rng.shuffle(body_fields)
    split = words.rng.randint(0, len(body_fields))
    body, below = body_fields[:split], body_fields[split:]
    lines = [words.pick(HELLOS).format(o=words.first())] if words.chance(0.8) else []
    if words.chance(0.3):
        lines.insert(0, f"Subject: {filler(words, 1)[:-1]}")
    sentences = [words.pick(NOISE).format(r=words.rng.randint(100, 9999))] if words.chance(0.6) or not body else []
    if name is not None and words.chance(0.3):
        sentences.append(words.pick(SELF["name"]).format(v=name))
    sentences += [words.pick(SELF[field]).format(v=values[field]) for field in body]
    if words.chance(0.3):
        sentences.append(words.pick(NOISE).format(r=words.rng.randint(100, 9999)))
    lines.append(" ".join(sentences))
    lines.append(words.pick(BYES))
    if name is not None:
        lines.append(str(name))
    lines += block(words, values, below)
    return words.pick(["\n", "\n", "\n\n"]).join(lines)


def block(words: Words, values: dict[str, Json], fields: list[str]) -> list[str]:
    """Signature lines; ages and dates get their label, the rest may stand bare."""
    lines: list[str] = []
    fields = list(fields)
    if {"role", "company"} <= set(fields) and words.chance(0.6):
        fields = [field for field in fields if field not in ("role", "company")]
        glue = words.pick([", ", " at ", " | ", " - ", " @ "])
        lines.append(f"{values['role']}{glue}{values['company']}")
    for field in fields:
        bare = is_plain(field, values) and words.chance(0.6)
        label = words.pick(LABELS[field])
        lines.append(f"{values[field]}" if bare else f"{label}: {values[field]}")
    return lines


def is_plain(field: str, values: dict[str, Json]) -> bool:
    """Whether the bare value says which field it is (a bare place could be a firm)."""
    value = str(values[field])
    return field in ("role", "email", "phone") or (field == "company" and value.split()[-1] in SUFFIXES)


def signature(words: Words, values: dict[str, Json]) -> str:
    fields = [field for field in values if field != "name"]
    words.rng.shuffle(fields)
    lines = block(words, values, fields)
    if "name" in values:
        lines.insert(0, str(values["name"]))
    if words.chance(0.3):
        lines.insert(0, words.pick(["--", "---", "Regards", "Sent from my phone"]))
    return words.pick(["\n", "\n", " | ", " / ", ", "]).join(lines)


def listing(words: Words, values: dict[str, Json]) -> str:
    fields = list(values)
    words.rng.shuffle(fields)
    if words.chance(0.6):
        fields.sort(key=lambda field: field != "name")
    glue = words.pick([": ", ": ", ": ", "=", " - ", ":"])
    start = words.pick(["", "", "- ", "* "])
    lines = [f"{start}{words.pick(LABELS[field])}{glue}{values[field]}" for field in fields]
    if words.chance(0.15):
        lines.insert(words.rng.randint(0, len(lines)), f"{start}Ref{glue}{words.rng.randint(1000, 99999)}")
    return words.pick(["\n", "\n", "\n", "; ", ", "]).join(lines)


def note(words: Words, values: dict[str, Json]) -> str:
    """Hurried notes: fragments, brackets, lower case labels."""
    name = values.get("name")
    parts: list[str] = []
    fields = [field for field in values if field != "name"]
    words.rng.shuffle(fields)
    head = words.pick(
        ["call {v}", "met {v}", "{v}", "todo: write {v}", "re: {v}", "lead: {v}", "from {v}", "spoke w/ {v}"]
    )
    if name is not None:
        parts.append(head.format(v=name))
    short = {
        "age": ["{v} y/o", "age {v}", "{v} years old"],
        "city": ["in {v}", "lives in {v}", "from {v}"],
        "company": ["at {v}", "works at {v}", "({v})", "@ {v}"],
        "role": ["{v}", "({v})", "is a {v}", "role: {v}"],
        "email": ["{v}", "mail {v}", "<{v}>", "email: {v}"],
        "phone": ["{v}", "tel {v}", "ph {v}", "call {v}", "cell: {v}"],
        "date": ["on {v}", "by {v}", "starts {v}", "since {v}", "meeting {v}"],
    }
    parts += [words.pick(short[field]).format(v=values[field]) for field in fields]
    if words.chance(0.3):
        parts.append(
            words.pick(["wants a quote", "nice chat", "urgent!", "asked about prices", "follow up", "likes the demo"])
        )
    return words.pick([", ", " - ", ", ", "; ", " / "]).join(parts)


def ask_keys(words: Words, values: dict[str, Json]) -> list[str]:
    """Two to six fields in the order asked: most of what is there, some that is not."""
    count = words.rng.randint(2, 6)
    there = [field for field in values if words.chance(0.85)]
    absent = [field for field in FIELDS if field not in values]
    words.rng.shuffle(there)
    words.rng.shuffle(absent)
    keys = there[:count]
    keys += absent[: max(2 - len(keys), sum(words.chance(0.25) for _ in range(count - len(keys))))]
    words.rng.shuffle(keys)
    return keys


def list_keys(words: Words, keys: list[str]) -> str:
    kind = words.rng.random()
    if kind < 0.75:
        return ", ".join(keys)
    if kind < 0.85:
        return dumps(keys)
    return f"{', '.join(keys[:-1])} and {keys[-1]}"


def plain_extraction(words: Words) -> Sample:
    """From one to four sentences."""
    return extraction(words, plain=True)


def extraction(words: Words, plain: bool = False) -> Sample:
    kind = words.rng.random()
    if kind < 0.8:
        return in_chat(words, plain)
    if kind < 0.92:
        return in_text(words, plain)
    return field_by_field(words, plain)


def in_chat(words: Words, plain: bool) -> Sample:
    messages = [Message("system", words.pick(SYSTEMS))] if words.chance(0.6) else []
    if words.chance(0.2):
        made = record(words, plain)
        keys = ask_keys(words, made.values)
        content = words.pick(ASKS_BEFORE).format(keys=list_keys(words, keys), text=made.text)
        messages += [Message("user", content, cut=len(content)), Message("assistant", made.answer(keys), answer=True)]
        return chat("extraction", messages)
    ask = words.pick(ASKS)
    for _ in range(words.pick([1, 1, 2, 3])):
        made = record(words, plain)
        keys = ask_keys(words, made.values)
        content = ask.format(keys=list_keys(words, keys), text=made.text)
        messages.append(Message("user", content, cut=content.index(made.text) + len(made.text)))
        messages.append(Message("assistant", made.answer(keys), answer=True))
        if words.chance(0.25):
            again = ask_keys(words, made.values)
            messages.append(Message("user", words.pick(ASKS_AGAIN).format(keys=list_keys(words, again)), gap="turns"))
            messages.append(Message("assistant", made.answer(again), answer=True))
    return chat("extraction", messages)


def in_text(words: Words, plain: bool) -> Sample:
    """Few shots in plain text; the fields may be told once by the shots."""
    spans: list[Span] = [Span(words.pick(["Extract the fields as JSON.\n\n", "Text to JSON.\n\n", "", ""]))]
    for _ in range(words.rng.randint(1, 3)):
        made = record(words, plain)
        keys = ask_keys(words, made.values)
        spans.append(Span(f"Text: {made.text}"))
        spans.append(Span(f"\nFields: {', '.join(keys)}\nJSON:", gap="text"))
        spans.append(Span(f" {made.answer(keys)}\n", answer=True))
        spans.append(Span("\n"))
    return raw("extraction", *spans)


def field_by_field(words: Words, plain: bool) -> Sample:
    """One value a line, as a program of several `gen` calls asks for it."""
    made = record(words, plain)
    keys = ask_keys(words, made.values)
    spans = [Span(f"{words.pick(['Text: ', '', 'Note: '])}{made.text}"), Span("\n\n", gap="text")]
    for key in keys:
        value = made.values.get(key)
        spans.append(Span(f"{key}:"))
        spans.append(Span(f" {'null' if value is None else value}\n", answer=True))
    return raw("extraction", *spans)
