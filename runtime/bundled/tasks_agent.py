"""Tasks that act: `tools` (call, result, answer) and `react` (Thought / Action / Observation / Finish)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from niwaki.runtime.bundled.sample import Json, Message, Sample, Span, Tool, chat, dumps, raw, tool_call
from niwaki.runtime.bundled.words import COLORS, FOODS, THINGS, WEEKDAYS, Words

Value = Callable[[Words], Json]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of tool: how users ask for it, what it returns, and how the answer tells it."""

    names: tuple[str, ...]
    description: str
    arguments: tuple[tuple[tuple[str, ...], str, Value], ...]  # possible names, JSON type, value
    requests: tuple[str, ...]  # {0}, {1}: the arguments
    result: tuple[tuple[str, Value], ...]
    answer: str  # {0}, {1}: the arguments; {name}: a field of the result


def _city(words: Words) -> Json:
    return words.city()


def _name(words: Words) -> Json:
    return words.name() if words.chance(0.5) else words.first()


def _number(words: Words) -> Json:
    return words.rng.randint(1, 99)


def _price(words: Words) -> Json:
    return words.rng.randint(2, 999)


def _of(items: list[str]) -> Value:
    return lambda words: words.pick(items)


def _code(words: Words) -> Json:
    return words.digits(words.rng.randint(3, 5))


SKY = ["rain", "sun", "snow", "fog", "wind", "clouds"]
CURRENCIES = ["dollars", "euros", "pounds", "yen", "francs"]
PLACE = ("city", "place", "location")
KINDS = [
    Kind(
        ("get_weather", "weather", "lookup_weather"),
        "Current weather of a city",
        ((PLACE, "string", _city),),
        ("What is the weather in {0}?", "How is the weather in {0}?", "Do I need a coat in {0}?", "Weather in {0}?"),
        (("sky", _of(SKY)), ("degrees", _number)),
        "There is {sky} in {0}, {degrees} degrees.",
    ),
    Kind(
        ("get_time", "time", "clock"),
        "Local time in a city",
        ((PLACE, "string", _city),),
        ("What time is it in {0}?", "Tell me the time in {0}.", "How late is it in {0}?"),
        (("time", lambda words: f"{words.rng.randint(0, 23)}:{words.rng.randint(10, 59)}"),),
        "It is {time} in {0}.",
    ),
    Kind(
        ("send_email", "email", "send_mail"),
        "Send an email to an address",
        (
            (("to", "address"), "string", lambda words: words.email()),
            (("text", "body"), "string", lambda words: phrase(words)),
        ),
        ('Send "{1}" to {0}.', 'Mail {0}: "{1}".', 'Write to {0} and say "{1}".', 'Email "{1}" to {0}.'),
        (("status", _of(["sent", "failed"])),),
        "The email to {0} was {status}.",
    ),
    Kind(
        ("find_contact", "get_contact", "lookup_contact"),
        "Find the phone number of a person",
        ((("name", "person"), "string", _name),),
        (
            "What is the number of {0}?",
            "Find the phone number of {0}.",
            "How can I call {0}?",
            "Give me the phone of {0}.",
        ),
        (("phone", lambda words: words.phone()),),
        "The phone number of {0} is {phone}.",
    ),
    Kind(
        ("get_price", "price", "price_of"),
        "Price of a product",
        ((("product", "item"), "string", _of(THINGS + FOODS)),),
        ("How much is the {0}?", "What does the {0} cost?", "Price of the {0}?", "Tell me the price of the {0}."),
        (("price", _price),),
        "The {0} costs {price} dollars.",
    ),
    Kind(
        ("order", "buy", "order_product"),
        "Order a number of products",
        ((("product", "item"), "string", _of(THINGS + FOODS)), (("count", "quantity"), "integer", _number)),
        ("Order {1} {0}.", "Buy {1} {0}.", "I want {1} {0}.", "Please order {0}, {1} of them."),
        (("order", _code),),
        "Your order of {1} {0} has the number {order}.",
    ),
    Kind(
        ("book_table", "reserve_table", "book_restaurant"),
        "Book a table in a restaurant",
        (
            (("restaurant", "name"), "string", lambda words: words.word()),
            (("people", "guests"), "integer", lambda words: words.rng.randint(1, 12)),
            (("day", "date"), "string", _of(WEEKDAYS)),
        ),
        (
            "Book a table for {1} at {0} on {2}.",
            "Reserve a table at {0} for {1} people on {2}.",
            "We are {1} and want to eat at {0} on {2}.",
        ),
        (("time", lambda words: f"{words.rng.randint(17, 22)}:{words.pick(['00', '15', '30', '45'])}"),),
        "Your table at {0} is booked for {2} at {time}.",
    ),
    Kind(
        ("add", "sum", "add_numbers"),
        "Add two numbers",
        ((("a", "x"), "integer", _price), (("b", "y"), "integer", _price)),
        ("What is {0} plus {1}?", "Add {0} and {1}.", "Sum of {0} and {1}?", "How much is {0} + {1}?"),
        (("result", lambda words: words.rng.randint(5, 1999)),),
        "The sum is {result}.",
    ),
    Kind(
        ("multiply", "product_of", "times"),
        "Multiply two numbers",
        ((("a", "x"), "integer", _number), (("b", "y"), "integer", _number)),
        ("What is {0} times {1}?", "Multiply {0} by {1}.", "How much is {0} * {1}?"),
        (("result", lambda words: words.rng.randint(5, 9801)),),
        "The product is {result}.",
    ),
    Kind(
        ("convert", "exchange", "convert_money"),
        "Convert money to another currency",
        ((("amount", "value"), "integer", _price), (("currency", "to"), "string", _of(CURRENCIES))),
        ("How much are {0} dollars in {1}?", "Convert {0} dollars to {1}.", "Change {0} dollars into {1}."),
        (("amount", _price),),
        "{0} dollars are {amount} {1}.",
    ),
    Kind(
        ("search", "web_search", "find_page"),
        "Search the web",
        ((("query", "q", "text"), "string", lambda words: phrase(words)),),
        ('Search for "{0}".', 'Look up "{0}" on the web.', 'Find pages on "{0}".'),
        (("pages", _price),),
        'I found {pages} pages on "{0}".',
    ),
    Kind(
        ("set_reminder", "remind", "add_reminder"),
        "Set a reminder",
        ((("text", "note"), "string", lambda words: phrase(words)), (("day", "date"), "string", _of(WEEKDAYS))),
        ('Remind me on {1}: "{0}".', 'Set a reminder "{0}" for {1}.', 'On {1} remind me of "{0}".'),
        (("id", _code),),
        "The reminder {id} is set for {1}.",
    ),
    Kind(
        ("get_boss", "boss_of", "find_boss"),
        "Boss of an employee",
        ((("name", "person", "employee"), "string", _name),),
        ("Who is the boss of {0}?", "Who does {0} report to?", "Find the boss of {0}."),
        (("boss", _name),),
        "The boss of {0} is {boss}.",
    ),
    Kind(
        ("get_capital", "capital", "capital_of"),
        "Capital of a country",
        ((("country", "land"), "string", _city),),
        ("What is the capital of {0}?", "Capital of {0}?", "Tell me the capital of {0}."),
        (("capital", _city),),
        "The capital of {0} is {capital}.",
    ),
    Kind(
        ("find_train", "train", "next_train"),
        "Next train between two cities",
        ((("start", "from_city", "origin"), "string", _city), (("end", "to_city", "destination"), "string", _city)),
        (
            "When does the train from {0} to {1} leave?",
            "Next train from {0} to {1}?",
            "I want to go from {0} to {1} by train.",
        ),
        (("time", lambda words: f"{words.rng.randint(5, 23)}:{words.rng.randint(10, 59)}"),),
        "The train from {0} to {1} leaves at {time}.",
    ),
    Kind(
        ("order_status", "track", "track_order"),
        "Status of an order",
        ((("order", "id", "number"), "string", _code),),
        ("Where is my order {0}?", "What is the status of order {0}?", "Track order {0}."),
        (("status", _of(["sent", "open", "lost", "ready", "closed"])),),
        "Order {0} is {status}.",
    ),
    Kind(
        ("turn_on", "switch_on", "light_on"),
        "Turn on the light in a room",
        ((("room", "place"), "string", _of(["kitchen", "hall", "cellar", "office", "garage"])),),
        ("Turn on the light in the {0}.", "It is dark in the {0}, light please.", "Switch on the {0} light."),
        (("status", _of(["on", "broken"])),),
        "The light in the {0} is {status}.",
    ),
    Kind(
        ("translate", "translate_word", "translation"),
        "Translate a word into a language",
        (
            (("word", "text"), "string", lambda words: phrase(words, 1)),
            (("language", "to"), "string", _of(["French", "German", "Spanish", "Dutch", "Italian"])),
        ),
        ('Translate "{0}" into {1}.', 'What is "{0}" in {1}?', 'How do you say "{0}" in {1}?'),
        (("translation", lambda words: words.syllables()),),
        '"{0}" in {1} is "{translation}".',
    ),
]
DO = (
    "check count open close lock find copy paint clean start stop move test scan print save load rent sell ship".split()
)
WHAT = "file door account device package ticket report engine card sample meter camera printer server robot".split()
CHATTER = [("Hello", "Hello! How can I help?"), ("Hi!", "Hello! How can I help?"), ("Thanks!", "You are welcome.")]
CHATTER += [("How are you?", "I am fine, thank you.")]
SYSTEMS = ["You are a helpful assistant.", "You can call tools.", "Use the tools when they help."]


def phrase(words: Words, count: int = 0) -> str:
    """One to four lower case words, some known and some made up."""
    pool = [*THINGS, *FOODS, *COLORS, "call", "meet", "new", "plan", "price", "of", "for", "old", "buy", "best"]
    made = [
        words.syllables(1, 2) if words.chance(0.4) else words.pick(pool)
        for _ in range(count or words.rng.randint(1, 4))
    ]
    return " ".join(made)


def invented(words: Words) -> Kind:
    """A tool that no list names: verb and noun drawn at random, told by its description alone."""
    verb, noun = words.pick(DO), words.pick([*WHAT, words.syllables(1, 2)])
    key = words.pick(["id", "name", "key", noun, "target"])
    value: Value = words.pick([_code, lambda w: w.syllables(), _name])
    field = words.pick(["state", "status", "level", "result", "owner"])
    joined = words.pick([f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun}"])
    told: Value = words.pick([_code, lambda w: w.syllables(), _of(["ok", "done", "failed", "ready", "full", "empty"])])
    return Kind(
        (joined,),
        f"{verb.capitalize()} a {noun}",
        (((key,), "string", value),),
        (f"{verb.capitalize()} the {noun} {{0}}.", f"Please {verb} {noun} {{0}}.", f"Can you {verb} the {noun} {{0}}?"),
        ((field, told),),
        f"The {field} of {{0}} is {{{field}}}.",
    )


def tools(words: Words) -> Sample:
    """Two to four tools; one to three requests, each a call, a result and an answer."""
    count = words.rng.randint(2, 4)
    kinds = [words.pick(KINDS) if words.chance(0.7) else invented(words) for _ in range(count)]
    kinds = list({kind.description: kind for kind in kinds}.values())
    while len(kinds) < 2:
        kinds.append(invented(words))
    offered: list[tuple[Kind, Tool]] = []
    for kind in kinds:
        parameters = {words.pick(names): json_type for names, json_type, _ in kind.arguments}
        offered.append((kind, Tool(words.pick(kind.names), kind.description, parameters)))
    messages = [Message("system", words.pick(SYSTEMS))] if words.chance(0.5) else []
    for turn in range(words.pick([1, 1, 2, 3])):
        if words.chance(0.06):
            asked, reply = words.pick(CHATTER)
            messages += [Message("user", asked), Message("assistant", reply, answer=True)]
            continue
        kind, tool = words.pick(offered)
        values = [value(words) for _, _, value in kind.arguments]
        arguments = dict(zip(tool.parameters, values, strict=True))
        result = {name: value(words) for name, value in kind.result}
        request = words.pick(kind.requests).format(*values)
        messages.append(Message("user", request, gap="turns" if turn else ""))
        messages.append(Message("assistant", tool_call(tool.name, arguments), answer=True))
        messages.append(Message("tool", dumps(result)))
        told = {name: str(value) for name, value in result.items()}
        messages.append(Message("assistant", kind.answer.format(*values, **told), answer=True))
    return chat("tools", messages, [tool for _, tool in offered])


RELATIONS = ["boss", "sister", "brother", "friend", "neighbor", "teacher"]
ATTRIBUTES: list[tuple[str, Value]] = [
    ("city", _city),
    ("company", lambda words: words.company()),
    ("role", lambda words: words.role()),
    ("age", lambda words: str(words.age())),
    ("pet", _of(["dog", "cat", "horse", "parrot", "goat"])),
    ("color", _of(COLORS)),
    ("code", _code),
]
REACT_HEADS = [
    "Answer the question. Use lookup[name] to look up a person.\n\n",
    "Tool: lookup[name]\n\n",
    "Think, act, observe, finish. Action: lookup[name]\n\n",
    "",
]


def react(words: Words) -> Sample:
    """One or two traces of one to three lookups over people who know each other."""
    spans: list[Span] = [Span(words.pick(REACT_HEADS))]
    for _ in range(words.pick([1, 1, 2])):
        spans += trace(words)
        spans.append(Span("\n"))
    return raw("react", *spans[:-1])


def trace(words: Words) -> list[Span]:
    hops = words.pick([0, 1, 1, 1, 2])
    people = [words.name() if words.chance(0.4) else words.first() for _ in range(hops + 1)]
    path = words.some(RELATIONS, hops, hops)
    wanted, value = words.pick(ATTRIBUTES)
    answer = str(value(words))
    chain = f"the {wanted} of " + "".join(f"the {relation} of " for relation in reversed(path)) + people[0]
    question = words.pick([f"What is {chain}?", f"What is {chain}?", f"Tell me {chain}.", f"Find {chain}."])
    spans = [Span(f"Question: {question}\n")]
    for step, person in enumerate(people):
        need = path[step] if step < hops else wanted
        target = people[step + 1] if step < hops else answer
        spans.append(Span(f"Thought: I need the {need} of {person}.\nAction: lookup[{person}]\n", answer=True))
        facts = [(need, target)]
        for other, made in words.some([pair for pair in ATTRIBUTES if pair[0] not in (need, wanted)], 0, 3):
            facts.append((other, str(made(words))))
        if words.chance(0.4):
            extra = words.pick([relation for relation in RELATIONS if relation not in (need, *path)])
            facts.append((extra, words.first()))
        words.rng.shuffle(facts)
        shape = words.pick(["The {k} of {p} is {v}.", "The {k} is {v}.", "{k}: {v}."])
        told = " ".join(shape.format(k=key, p=person, v=told) for key, told in facts)
        spans.append(Span(f"Observation: {told}\n"))
    spans.append(Span(f"Thought: I know the answer.\nFinish: {answer}\n", answer=True))
    return spans
