"""Chat messages as prompt text: the model's template around the contents, which it never sees.

The template is rendered with a placeholder for each content; what stands between the placeholders is template text and
may hold special tokens, the contents may not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from niwaki.runtime.api import Message, Segment
from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.tokenizer import Tokenizer

# Of Unicode's private use area, where no template text stands.
PLACEHOLDER = re.compile("\ue000([0-9]+)\ue001")


def segments(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Segment]:
    """The prompt of a conversation, up to where the assistant's answer begins.

    Raises:
        ApiError, UnsupportedByBackend, ProgramError: the model has no template, or it does not write these turns.
    """
    stand_ins = [Message(message.role, f"\ue000{index}\ue001") for index, message in enumerate(messages)]
    rendering = tokenizer.render(stand_ins, add_generation_prompt=True)
    pieces = PLACEHOLDER.split(rendering)  # template text and indices in turn
    indices = [int(index) for index in pieces[1::2]]
    if sorted(indices) != list(range(len(messages))):
        missing = next((i for i in range(len(messages)) if indices.count(i) != 1), 0)
        raise ApiError(
            400,
            f"the model's chat template does not write message {missing} ({messages[missing].role}) as one piece",
            param=f"messages[{missing}]",
        )
    found: list[Segment] = []
    for place, piece in enumerate(pieces):
        is_template = place % 2 == 0
        found.append(Segment(piece, control=True) if is_template else Segment(messages[int(piece)].content))
    return [segment for segment in found if segment.text]
