"""You will see where each likely first word of an answer leads, how sure the model stays, and the surest first."""

import math

import niwaki as nw

PASSAGE = (
    "Context:\nMira lives in Porto. Jonas lives in Bergen. Jonas works for Quarry Foods. Edda works for Harbor Media."
)
WAYS = 8


def sureness(state, name: str) -> float:
    """By how much the likeliest token led the second, where it led by least."""
    tops = state.get_meta_info(name)["output_top_logprobs"]
    return min(math.exp(first[0]) - math.exp(second[0]) for first, second in tops)


@nw.function
def decode(s, question: str):
    s += f"{PASSAGE}\nQuestion: {question}\nAnswer:"
    [look] = s.fork(1)
    look += nw.gen("first", max_new_tokens=1, top_logprobs_num=WAYS)
    [tops] = look.get_meta_info("first")["output_top_logprobs"]
    words = [text for _, _, text in tops if text[0] not in "<\n"]  # neither template marks nor line ends
    ways = s.fork(len(words))  # the passage is in the cache
    ways += words
    ways += nw.gen("rest", max_new_tokens=12, stop="\n", top_logprobs_num=2)
    answers = [(sureness(way, "rest"), word + way["rest"]) for word, way in zip(words, ways, strict=True)]
    return sorted(answers, reverse=True)


if __name__ == "__main__":
    for question in ("Where does Jonas live?", "Who works for Harbor Media?"):
        print(question)
        for sure, answer in decode.run(question=question, temperature=0).ret_value:
            print(f"  {sure:.2f} {answer}")
