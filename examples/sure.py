"""You will see the fields of a contact, and how sure the model was of each: the probability of its worst token."""

import math
import re

from pydantic import BaseModel

import niwaki as nw


class Contact(BaseModel):
    name: str
    role: str
    city: str | None


@nw.function
def extract(s, text: str):
    s += nw.system("You extract facts as JSON.")
    s += nw.user(f"{text}\n\nFields: {', '.join(Contact.model_fields)}")
    s += nw.assistant(nw.gen("contact", dtype=Contact, return_logprob=True))
    written, sure = "", dict[str, float]()
    for logprob, _, piece in s.get_meta_info("contact")["output_token_logprobs"]:
        written += piece
        for field in re.findall(r'"(\w+)":', written)[-1:]:  # the one that is being written
            sure[field] = min(sure.get(field, 1.0), math.exp(logprob))
    return sure


if __name__ == "__main__":
    for text in ("Hi, I'm Lena Fischer, a nurse from Dresden.", "This is Omar Haddad from Leeds."):  # of what trade?
        state = extract.run(text, temperature=0)
        print(text)
        for field, value in state["contact"]:
            print(f"  {state.ret_value[field]:.2f} {field}: {value}")
