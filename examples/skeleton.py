"""You will see a skeleton of thought: first the chapters of a guide, then every chapter written at the same time."""

import niwaki as nw

CHAPTERS = ["staying healthy", "saving money", "sleeping better", "working at home", "gardening"]
NUM_CHAPTERS = 3


@nw.function
def guide(s, topic: str):
    s += nw.system("You are a helpful assistant.")
    chosen = []
    for number in range(NUM_CHAPTERS):  # the skeleton
        left = [chapter for chapter in CHAPTERS if chapter not in chosen]
        s += nw.user(f"Chapter {number + 1} of a guide to {topic}?") + nw.assistant(nw.select("chapter", choices=left))
        chosen.append(s["chapter"])
    branches = s.fork(NUM_CHAPTERS)  # every branch has the whole skeleton before it, which is read once
    branches += [nw.user(f"List two tips for {chapter}.") for chapter in chosen]
    branches += nw.assistant(nw.gen("text", temperature=0, max_new_tokens=48))
    branches.join()
    return dict(zip(chosen, s["text"], strict=True))


if __name__ == "__main__":
    for chapter, text in guide.run(topic="a good life").ret_value.items():
        print(chapter.capitalize(), text, sep="\n", end="\n\n")
