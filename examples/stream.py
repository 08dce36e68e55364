"""You will see an answer appear piece by piece while the program runs, then what its tokens cost."""

import niwaki as nw


@nw.function
def tips(s, subject: str):
    s += nw.system("You are a helpful assistant.")
    s += nw.user(f"Give me three tips for {subject}.")
    s += nw.assistant(nw.gen("tips", temperature=0, max_new_tokens=64))


if __name__ == "__main__":
    state = tips.stream(subject="sleeping better")  # returns at once; the program runs on a thread of its own
    for piece in state.text_iter("tips"):
        print(piece, end="", flush=True)
    usage = state.usage
    print(f"\n\n{usage.prompt_tokens} tokens read, {usage.generated_tokens} written")
