"""You will see the rows of a table become rows of another one, each with its own id and the facts that its text states.

niwaki run examples/people.py:people --input notes.csv --output people.csv
"""

from pydantic import BaseModel

import niwaki as nw


class Person(BaseModel):
    name: str | None
    city: str | None


@nw.function
def people(s, id: int, text: str):
    s += nw.system("You extract facts as JSON.")
    s += nw.user(f"{text}\n\nFields: name, city")
    s += nw.assistant(nw.gen("person", dtype=Person, temperature=0))
    return {"id": id, **s["person"].model_dump()}


if __name__ == "__main__":
    notes = [{"id": 7, "text": "Lena Fischer lives in Dresden."}, {"id": 9, "text": "Omar Haddad is from Graz."}]
    for state in people.run_batch(notes):
        print(state.ret_value)
