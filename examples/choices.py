"""You will see a review labelled by each of the four ways to select, with the probability of every label."""

import niwaki as nw

LABELS = [" positive", " negative", " neutral"]
METHODS = ("token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized", "exact")


@nw.function
def classify(s, review: str, method: str):
    s += "Classify the sentiment: positive, negative, neutral.\n\n"
    s += f"Text: {review}\nLabel:"
    s += nw.select("label", choices=LABELS, choices_method=method)


if __name__ == "__main__":
    for review in ("The staff was wonderful.", "The phone is useless.", "The book has 90 parts."):
        print(review)
        for method in METHODS:
            state = classify.run(review=review, method=method)
            told = ", ".join(f"{label.strip()} {p:.2f}" for label, p in state.probabilities("label").items())
            print(f"  {method:36}{state['label'].strip():10}({told})")
