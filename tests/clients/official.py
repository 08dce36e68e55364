"""OpenAI's own client, 2.x and 3.x alike, as its docs use it: typed answers, streams, responses that go on."""

from __future__ import annotations

import openai
from pydantic import BaseModel

MODEL = "niwaki-tiny"


def check(url: str, ask: str, shape: type[BaseModel]) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    parsed = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": ask}], response_format=shape, temperature=0
    )
    assert parsed.choices[0].message.parsed is not None
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Say hello."}],
        max_completion_tokens=20,
        stream_options={"include_usage": True},
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == final.choices[0].message.content
    assert final.usage is not None
    assert final.usage.completion_tokens > 0
    response = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=20)
    more = client.responses.create(model=MODEL, input="Again.", previous_response_id=response.id, max_output_tokens=20)
    assert more.usage is not None
    assert response.usage is not None
    assert more.usage.input_tokens > response.usage.input_tokens
