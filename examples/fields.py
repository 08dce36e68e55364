"""You will see the same facts twice: in JSON that the program writes around the words, and as a typed object."""

from pydantic import BaseModel

import niwaki as nw


class Person(BaseModel):
    name: str
    city: str
    phone: str | None


def ask(s, text: str):
    s += nw.system("You extract facts as JSON.")
    s += nw.user(f"{text}\n\nFields: {', '.join(Person.model_fields)}")


@nw.function
def by_hand(s, text: str):
    ask(s, text)
    with s.assistant(), s.var_scope("person"):  # the text that comes inside is the variable's value
        s += '{"name":"' + nw.gen("name", stop='"', max_new_tokens=16)
        s += '","city":"' + nw.gen("city", stop='"', max_new_tokens=16)
        s += '","phone":"' + nw.gen("phone", regex="[0-9][0-9 -]{3,15}") + '"}'


@nw.function
def by_type(s, text: str):
    ask(s, text)
    s += nw.assistant(nw.gen("person", dtype=Person))  # nothing but a Person can come out


if __name__ == "__main__":
    TEXT = "Hello, this is Lena Fischer from Dresden, call me at 555-0147."
    print(by_hand.run(text=TEXT, temperature=0)["person"])
    print(by_type.run(text=TEXT, temperature=0)["person"])
