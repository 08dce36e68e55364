"""You will see the engine without the language: a batch of prompts, a stream, and two requests awaited side by side."""

import asyncio

import niwaki as nw

PASSAGE = "Mira lives in Porto. Jonas lives in Bergen."
PROMPTS = [f"{PASSAGE}\nQuestion: Where does {name} live?\nAnswer:" for name in ("Mira", "Jonas")]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "stop": "\n"}


async def both(engine: nw.Engine):
    return await asyncio.gather(*(engine.async_generate(prompt, GREEDY) for prompt in PROMPTS))


def main() -> None:
    with nw.Engine() as engine:
        for result in engine.generate(PROMPTS, GREEDY):
            told = result["meta_info"]
            print(f"{result['text'].strip()}: {told['prompt_tokens']} tokens read, {told['cached_tokens']} cached")
        for result in engine.generate("1, 2, 3,", {"temperature": 0, "max_new_tokens": 24}, stream=True):
            print(f"\r1, 2, 3,{result['text']}", end="", flush=True)
        print()
        print(*(result["text"].strip() for result in asyncio.run(both(engine))), sep=" and ")


if __name__ == "__main__":
    main()
