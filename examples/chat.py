"""You will see a conversation in the terminal in which the model remembers what it was told.

Try: "My code is 4182." and later "What is my code?". An empty line ends it; lines may be piped in.
"""

import sys

import niwaki as nw


@nw.function
def chat(s, lines):
    s += nw.system("You are a helpful assistant.")
    for number, line in enumerate(lines):
        reply = f"reply {number}"
        s += nw.user(line)
        s += nw.assistant(nw.gen(reply, temperature=0, max_new_tokens=64))
        for piece in s.text_iter(reply):  # as it is written; earlier turns stay in the cache
            print(piece, end="", flush=True)
        print()


def typed_lines():
    while line := (input("> ") if sys.stdin.isatty() else sys.stdin.readline()).strip():
        yield line


if __name__ == "__main__":
    chat.run(lines=typed_lines())
