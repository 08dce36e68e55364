"""You will see judges rate each of two answers, all at the same time, and a verdict from the sum of their ratings."""

from typing import Literal

import niwaki as nw

TEXT = "Mira lives in Porto."
ANSWERS = ["Mira lives in Bergen.", "Mira lives in Porto."]
JUDGES = ["Rate the answer from 1 to 5.", "Rating from 1 to 5:", "Which rating from 1 to 5?"]
Rating = Literal["1", "2", "3", "4", "5"]


@nw.function
def judge(s, text: str, answers: list[str]):
    s += f"Text: {text}\n"
    candidates = s.fork(len(answers))  # the text is read once for all
    for answer, candidate in zip(answers, candidates, strict=True):
        candidate += f"Answer: {answer}\n"
        judges = candidate.fork(len(JUDGES))
        judges += JUDGES
        judges += " " + nw.gen("rating", dtype=Rating, temperature=0)
        judges.join()
    candidates.join()  # s["rating"]: a list of ratings for each answer
    sums = [sum(int(rating) for rating in ratings) for ratings in s["rating"]]
    return answers[sums.index(max(sums))]


if __name__ == "__main__":
    state = judge.run(text=TEXT, answers=ANSWERS)
    for answer, ratings in zip(ANSWERS, state["rating"], strict=True):
        print(f"{answer:25}{' '.join(ratings)}")
    print("verdict:", state.ret_value)
