"""You will see a tree of thoughts: ways to go on, grown side by side, and the likeliest two of them kept each round."""

import niwaki as nw

START = "1, 2, 4,"
WAYS, KEPT, ROUNDS = 3, 2, 3


def logprob_of(state):
    return sum(logprob for logprob, _, _ in state.get_meta_info("next")["output_token_logprobs"])


@nw.function
def search(s, start: str):
    s += start
    kept = [(0.0, s)]
    for _ in range(ROUNDS):
        grown = []
        for score, thought in kept:
            ways = thought.fork(WAYS)  # what stands before is in the cache
            ways += lambda i: nw.gen("next", regex=" [0-9]{1,2},", temperature=0.7 * i, seed=i, return_logprob=True)
            grown += [(score, way) for way in ways]
        scored = {way.text(): (score + logprob_of(way), way) for score, way in grown}  # the same thought once
        kept = sorted(scored.values(), key=lambda pair: -pair[0])[:KEPT]
        print("\n".join(f"{score:7.2f}  {thought.text()}" for score, thought in kept), "\n")
    return kept[0][1].text()


if __name__ == "__main__":
    print("best:", search.run(start=START).ret_value)
