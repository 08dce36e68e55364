"""You will see three typed values fill in at the same time, redrawn in the terminal while the model writes them."""

import asyncio
import sys

from pydantic import BaseModel

import niwaki as nw

TEXTS = ["Lena Fischer lives in Dresden.", "My name is Omar Haddad, I live in Leeds.", "Edda Holm is from Graz."]


class Person(BaseModel):
    name: str | None
    city: str | None


@nw.function
async def read(s, texts: list[str], draw):
    s += nw.system("You extract facts as JSON.")
    forks = s.fork(len(texts))
    forks += [nw.user(f"{text}\n\nFields: name, city") + nw.assistant(nw.gen("person", dtype=Person)) for text in texts]
    shown = ["..."] * len(texts)

    async def follow(number: int):
        async for person in forks[number].stream_value("person"):
            shown[number] = str(person)
            draw(shown)
        return person  # the finished one comes last

    return await asyncio.gather(*(follow(number) for number in range(len(texts))))


def redraw(lines: list[str]) -> None:
    if sys.stdout.isatty():  # clear each line, write it, and go back up
        print("".join(f"\x1b[K{line}\n" for line in lines), end=f"\x1b[{len(lines)}A", flush=True)


if __name__ == "__main__":
    print(*read.run(texts=TEXTS, draw=redraw, temperature=0).ret_value, sep="\n")
