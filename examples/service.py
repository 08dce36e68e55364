"""You will see programs on an OpenAI-compatible service: a request for each field of a person, then one for all."""

from pydantic import BaseModel

import niwaki as nw
from niwaki.runtime.server.serve import serving  # the service here is our own; any other does too


class Person(BaseModel):
    name: str
    city: str


def ask(s, text: str):
    s += f"Extract the fields as JSON.\n{text}\n\nFields: name, city\nJSON: "


@nw.function
def by_field(s, text: str):
    ask(s, text)
    s += '{"name":"' + nw.gen("name", stop='"', max_new_tokens=16)
    s += '","city":"' + nw.gen("city", stop='"', max_new_tokens=16) + '"}'


@nw.function
def by_type(s, text: str):
    ask(s, text)
    s += nw.gen("person", dtype=Person)


if __name__ == "__main__":
    TEXT = "Hello, this is Lena Fischer from Dresden."
    with nw.Engine() as engine, serving(engine) as url:
        service = nw.OpenAI("niwaki-tiny", base_url=f"{url}/v1", api_key="-", api="completions", extensions=True)
        for program in (by_field, by_type):
            state = program.run(TEXT, temperature=0, backend=service)
            print(f"{state.usage.calls} sent:", state.text().partition("JSON: ")[2])
        service.shutdown()
