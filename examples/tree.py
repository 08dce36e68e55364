"""You will see a passage read once, four branches that each guess an answer, a judge that picks the best guess,
and how few of the tokens that they read were computed."""

import niwaki as nw

PASSAGE = """Context:
Mira Lund lives in Porto. Mira Lund works for Lantern Labs.
Jonas Weber lives in Bergen. Jonas Weber works for Quarry Foods.
Edda Holm lives in Leeds. Edda Holm works for Harbor Media."""


@nw.function
def answer(s, question: str, num_branches: int = 4):
    s += nw.system("Answer from the context.")
    s += nw.user(f"{PASSAGE}\nQuestion: {question}")
    forks = s.fork(num_branches)  # the passage is in the cache: a branch costs its own tokens only
    forks += lambda i: nw.assistant(nw.gen("guess", temperature=1, seed=i, max_new_tokens=12))
    forks.join()  # the guesses of all branches, as a list
    guesses = sorted({guess.strip() for guess in s["guess"]} - {""})
    s += nw.assistant(nw.select("best", choices=guesses))


if __name__ == "__main__":
    for question in ("Where does Jonas Weber live?", "Who works for Lantern Labs?"):
        state = answer.run(question=question)
        print(question)
        for index, guess in enumerate(state["guess"]):
            print(f"  branch {index}: {guess.strip()}")
        print(f"  judge: {state['best']}")
        tokens = state.tree().totals()
        print(f"  {tokens.calls} calls read {tokens.prompt_tokens} tokens; {tokens.prefilled} were computed\n")
