"""You will see each message of an inbox become one typed contact.

niwaki run examples/extract.py:extract --input examples/data/inbox.txt --record-separator --- --output contacts.jsonl
"""

from pydantic import BaseModel

import niwaki as nw


class Contact(BaseModel):
    name: str | None
    email: str | None
    phone: str | None
    company: str | None
    role: str | None
    city: str | None


SHOWN = "spoke w/ Nora Lindt, buyer at Lindt Papers - tel 555-0101, wants a quote"
FOUND = Contact(name="Nora Lindt", email=None, phone="555-0101", company="Lindt Papers", role="buyer", city=None)


def question(text: str) -> str:
    return f"{text}\n\nFields: {', '.join(Contact.model_fields)}"


@nw.function
def extract(s, text: str):
    s += nw.system("You extract facts as JSON.")
    s += nw.user(question(SHOWN)) + nw.assistant(FOUND.model_dump_json())  # computed once for all records
    s += nw.user(question(text))
    s += nw.assistant(nw.gen("contact", dtype=Contact, temperature=0, max_new_tokens=256))


if __name__ == "__main__":
    state = extract.run(text="Hi, I'm Lena Fischer, a nurse from Dresden. My email is lena@fischer.example.")
    print(state["contact"])
