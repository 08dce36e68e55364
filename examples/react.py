"""You will see an agent think, call a Python function, read what it returns, and finish with an answer."""

import niwaki as nw

FACTS = {
    "Mira": {"boss": "Jonas", "city": "Porto", "pet": "parrot"},
    "Jonas": {"boss": "Edda", "city": "Bergen", "pet": "goat"},
    "Edda": {"sister": "Mira", "city": "Leeds", "pet": "cat"},
}
MAX_STEPS = 5


def lookup(name: str) -> str:
    """The tool: what is known of a person."""
    facts = FACTS.get(name, {})
    return " ".join(f"The {key} of {name} is {value}." for key, value in facts.items()) or "Nothing is known."


@nw.function
def agent(s, question: str):
    s += "Answer the question. Use lookup[name] to look up a person.\n\n"
    s += f"Question: {question}\n"
    for step in range(MAX_STEPS):
        s += "Thought:" + nw.gen(f"thought{step}", stop="\n", max_new_tokens=40) + "\n"
        s += nw.select("move", choices=["Action: lookup[", "Finish:"])
        if s["move"] == "Finish:":
            s += nw.gen("answer", stop="\n", max_new_tokens=16)
            return s["answer"].strip()
        s += nw.gen(f"name{step}", stop="]", max_new_tokens=16) + "]\n"
        s += f"Observation: {lookup(s[f'name{step}'].strip())}\n"
    return None


if __name__ == "__main__":
    for question in ("What is the city of the boss of Mira?", "What is the pet of Edda?"):
        state = agent.run(question=question, temperature=0)
        print(state.text().split("\n\n")[1], f"=> {state.ret_value}\n", sep="\n")
