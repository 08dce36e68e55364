"""openai 2.x, langchain-openai and pydantic-ai against the server at the address given, each as its own
docs use it. Exit code 0 when all of it works."""

from __future__ import annotations

import contextlib
import sys

import openai
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from official import check
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = "niwaki-tiny"
ASK = "I am Lena Fischer, a nurse from Dresden.\n\nFields: name, role, city"
TOKENS = 100


class Person(BaseModel):
    name: str
    role: str
    city: str


def test_openai(url: str) -> None:
    assert openai.VERSION.startswith("2."), openai.VERSION
    check(url, ASK, Person)


def test_langchain(url: str) -> None:
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=TOKENS)
    assert isinstance(chat.invoke([HumanMessage("Say hello.")]).content, str)
    assert "".join(str(chunk.content) for chunk in chat.stream("Say hello."))
    for method in ("json_schema", "function_calling"):
        answer = chat.with_structured_output(Person, method=method).invoke(ASK)
        assert isinstance(answer, Person), (method, answer)
    answer = chat.with_structured_output(None, method="json_mode").invoke(ASK)
    assert isinstance(answer, dict), answer


def test_pydantic_ai(url: str) -> None:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings = {"temperature": 0.0, "max_tokens": TOKENS}
    for kind in (ToolOutput(Person), NativeOutput(Person)):
        agent = Agent(model, output_type=kind, model_settings=settings, retries=0)
        assert isinstance(agent.run_sync(ASK).output, Person), kind
    # Prompted output leaves the form to the model: a small one may miss it, but it is asked and it answers.
    with contextlib.suppress(UnexpectedModelBehavior):
        Agent(model, output_type=PromptedOutput(Person), model_settings=settings, retries=0).run_sync(ASK)


def main(url: str) -> int:
    failed = 0
    for test in (test_openai, test_langchain, test_pydantic_ai):
        try:
            test(url)
        except Exception as error:
            failed += 1
            print(f"{test.__name__}: {type(error).__name__}: {error}")
        else:
            print(f"{test.__name__}: works")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
