"""You will see forks of forks: a branch for each person, in it one for each question, gathered as nested lists."""

import niwaki as nw

PASSAGE = """Context:
Mira lives in Porto. Mira works for Lantern Labs. Jonas lives in Bergen. Jonas works for Quarry Foods.
Edda lives in Leeds. Edda works for Harbor Media. Tom lives in Graz. Tom works for Pebble Systems."""
PEOPLE = ["Mira", "Jonas", "Edda", "Tom"]
QUESTIONS = ["Where does {} live?", "Who does {} work for?"]


@nw.function
def profile(s):
    s += PASSAGE
    people = s.fork(len(PEOPLE))
    for person, branch in zip(PEOPLE, people, strict=True):
        questions = branch.fork(len(QUESTIONS))  # every branch of both stages starts from the one passage
        questions += [f"\nQuestion: {question.format(person)}\nAnswer:" for question in QUESTIONS]
        questions += nw.gen("facts", stop="\n", temperature=0, max_new_tokens=12)
        questions.join()  # a list for each person ...
    people.join()  # ... in a list for all


if __name__ == "__main__":
    state = profile.run()
    for person, (city, company) in zip(PEOPLE, state["facts"], strict=True):
        print(f"{person:6}{city.strip():10}{company.strip()}")
