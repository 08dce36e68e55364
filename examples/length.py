"""You will see a list as long as the model makes it, and one that must have at least so many tokens."""

import niwaki as nw


@nw.function
def tips(s, subject: str, least: int):
    s += nw.system("You are a helpful assistant.")
    s += nw.user(f"List two tips for {subject}.")
    s += nw.assistant(nw.gen("tips", min_tokens=least, max_new_tokens=64))


if __name__ == "__main__":
    for least in (0, 40):
        state = tips.run(subject="gardening", least=least, temperature=0)
        written = state.get_meta_info("tips")["completion_tokens"]
        print(f"At least {least} tokens, {written} written:", state["tips"], sep="\n", end="\n\n")
