"""You will see nine answers drawn from one reading of the passage, and the one that most of them agree on."""

from collections import Counter

import niwaki as nw

PASSAGE = """Context:
Mira lives in Porto. Mira works for Lantern Labs. Jonas lives in Bergen. Jonas works for Quarry Foods.
Edda lives in Leeds. Edda works for Harbor Media. Tom lives in Graz. Tom works for Pebble Systems."""


@nw.function
def vote(s, question: str, n: int = 9):
    s += f"{PASSAGE}\nQuestion: {question}\nAnswer:"
    # The program has an argument n of its own, so the option stands on the gen.
    s += nw.gen("answers", n=n, temperature=1.5, seed=1, max_new_tokens=12, stop="\n")
    counts = Counter(answer.strip() for answer in s["answers"])
    s["answer"], s["votes"] = counts.most_common(1)[0]


if __name__ == "__main__":
    for question in ("Where does Edda live?", "Who works for Pebble Systems?"):
        state = vote.run(question=question)
        print(question)
        print("  drawn:", ", ".join(answer.strip() for answer in state["answers"]))
        print(f"  {state['votes']} of {len(state['answers'])} say {state['answer']}\n")
