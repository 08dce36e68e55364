"""You will see each letter that a list names labelled. One that is not there yet fails alone, and can run again later.

niwaki run examples/letters.py:label --input letters.txt --output labels.jsonl --retry-failed
"""

import tempfile
from pathlib import Path

import niwaki as nw


@nw.function
def label(s, path: str):
    s += f"Classify the sentiment: positive, negative.\n\nText: {Path(path).read_text('utf-8').strip()}\nLabel:"
    s += nw.select("label", choices=[" positive", " negative"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        letter = Path(folder, "letter.txt")
        [result] = label.run_batch([{"path": str(letter)}])
        print(type(result).__name__)
        letter.write_text("What a wonderful meal!\n", "utf-8")
        [result] = label.run_batch([{"path": str(letter)}])
        print(result["label"].strip())
