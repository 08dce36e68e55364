"""instructor on openai 3.x against the server at the address given: each of its modes, whole and as partial streams."""

from __future__ import annotations

import sys

import instructor
import openai
from pydantic import BaseModel

ASK = [{"role": "user", "content": "I am Lena Fischer, a nurse from Dresden.\n\nFields: name, role, city"}]


class Person(BaseModel):
    name: str
    role: str
    city: str


def main(url: str) -> None:
    assert openai.VERSION.startswith("3."), openai.VERSION
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
            client = instructor.from_openai(plain, mode=mode)
            said = {
                "model": "niwaki-tiny",
                "messages": ASK,
                "response_model": Person,
                "temperature": 0,
                "max_tokens": 80,
            }
            whole = client.create(**said, max_retries=0)
            assert isinstance(whole, Person), mode
            parts = list(client.create_partial(**said, max_retries=0))
            assert len(parts) > 3, mode
            assert parts[-1].model_dump() == whole.model_dump(), mode
            print(f"{mode.name}: works, {len(parts)} parts")


if __name__ == "__main__":
    main(sys.argv[1])
