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


@nw.function
def extract(s, text: str):
    s += nw.system("You extract facts as JSON.")
    s += nw.user(f"{text}\n\nFields: {', '.join(Contact.model_fields)}")
    s += nw.assistant(nw.gen("contact", dtype=Contact, temperature=0, max_new_tokens=128))


if __name__ == "__main__":
    state = extract.run(text="Hi, I'm Lena Fischer, a nurse from Dresden. My email is lena@fischer.example.")
    print(state["contact"])
