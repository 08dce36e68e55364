"""litellm against the server at the address given, as an OpenAI-compatible one."""

from __future__ import annotations

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the internet for prices as it is imported

import litellm

MODEL = "openai/niwaki-tiny"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "city": {"type": "string"}},
    "required": ["name", "city"],
    "additionalProperties": False,
}


def main(url: str) -> None:
    said = {"model": MODEL, "api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 60}
    messages = [{"role": "user", "content": "I am Lena Fischer, a nurse from Dresden.\n\nFields: name, city"}]
    answer = litellm.completion(messages=messages, **said)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0
    chunks = list(litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **said))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    person = json.loads(litellm.completion(messages=messages, response_format=shape, **said).choices[0].message.content)
    assert set(person) == {"name", "city"}
    text = litellm.text_completion(prompt="The cat", **(said | {"model": "text-completion-openai/niwaki-tiny"}))
    assert isinstance(text.choices[0].text, str)
    print("litellm: works")


if __name__ == "__main__":
    main(sys.argv[1])
