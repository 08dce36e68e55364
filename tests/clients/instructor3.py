"""openai 3.x, and instructor on it, against the server at the address given: each of its modes, whole and as partial
streams."""

from __future__ import annotations

import sys

import instructor
import openai
from official import check
from pydantic import BaseModel

ASK = "I am Lena Fischer, a nurse from Dresden.\n\nFields: name, role, city"


class Person(BaseModel):
    name: str
    role: str
    city: str


def main(url: str) -> None:
    assert openai.VERSION.startswith("3."), openai.VERSION
    check(url, ASK, Person)
    print("openai 3: works")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
            client = instructor.from_openai(plain, mode=mode)
            said = {
                "model": "niwaki-tiny",
                "messages": [{"role": "user", "content": ASK}],
                "response_model": Person,
                "temperature": 0,
                "max_tokens": 80,
            }
            whole = client.create(**said, max_retries=0)
            assert isinstance(whole, Person), mode
            parts = list(client.create_partial(**said, max_retries=0))
            assert len(parts) > 1, mode
            assert parts[-1].model_dump() == whole.model_dump(), mode
            print(f"{mode.name}: works, {len(parts)} parts")


if __name__ == "__main__":
    main(sys.argv[1])
