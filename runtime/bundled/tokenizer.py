"""The tokenizer of niwaki-tiny: byte-level BPE trained on the generator's text, and its chat template.

Copying must be trivial, so a word has the same tokens wherever it stands: blanks are tokens of their own (only a closed
list of function words takes the blank before it along), digits and most punctuation stand alone, and the few fixed runs
of JSON punctuation never touch what is inside the quotes.

    python -m niwaki.runtime.bundled.tokenizer
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from niwaki.runtime.bundled import MODEL_DIR
from niwaki.runtime.bundled.generator import stream

SPECIAL = ["<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>"]
SPECIAL += ["<|/call|>", "<|think|>", "<|/think|>", *(f"<|reserved_{index}|>" for index in range(5))]
VOCABULARY = 2048
CONTEXT = 4096

# Words that no value begins with: only these carry their blank.
FUNCTION_WORDS = (
    "a an and are as at be been but by can could did do does for from had has have he her him his how i if in into is "
    "it its me my no not of on or our she so that the their them then there they this to under up us was we were what "
    "when where which who will with would you your after before last"
).split()
JSON_RUNS = ['":{"', '{"', '":"', '","', '"}}', '"}', '":', ',"']
SPLIT = "|".join(
    [
        *(run.replace("{", r"\{").replace("}", r"\}") for run in JSON_RUNS),
        rf" (?:{'|'.join(FUNCTION_WORDS)})(?![\p{{L}}\d'_.@-])",
        r"\p{L}+",
        r"\d",
        r"\s",
        r"[^\p{L}\d\s]",
    ]
)

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if messages and messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set rest = messages[1:] -%}
{%- else -%}
{%- set system = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- if tools -%}
{%- set ns = namespace(text=system + ('\\n' if system else '') + 'Tools:') -%}
{%- for tool in tools -%}
{%- set f = tool.function if tool.function is defined else tool -%}
{%- set args = namespace(text='') -%}
{%- for name, kind in ((f.parameters or {}).properties or {}).items() -%}
{%- set args.text = args.text + (', ' if args.text else '') + name + ': ' + (kind.type or 'string') -%}
{%- endfor -%}
{%- set ns.text = ns.text + '\\n- ' + f.name + '(' + args.text + '): ' + (f.description or '') -%}
{%- endfor -%}
{%- set system = ns.text -%}
{{- '<|system|>' + system + '<|end|>' -}}
{%- elif messages and messages[0].role == 'system' -%}
{{- '<|system|>' + system + '<|end|>' -}}
{%- endif -%}
{%- for message in rest -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.content -%}{{- message.content -}}{%- endif -%}
{%- if message.tool_calls -%}
{%- for call in message.tool_calls -%}
{%- set f = call.function if call.function is defined else call -%}
{{- '<|call|>{"name":"' + f.name + '","arguments":' -}}
{%- if f.arguments is string -%}{{- f.arguments -}}
{%- else -%}{{- f.arguments | tojson(separators=(',', ':')) -}}{%- endif -%}
{{- '}<|/call|>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def build(seed: int = 7, samples: int = 20_000) -> Tokenizer:
    """Train the vocabulary on text of the training side."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (span.text for sample in itertools.islice(stream(seed), samples) for span in sample.spans)
    tokenizer.train_from_iterator((_plain(text) for text in texts), trainer)
    bos = tokenizer.token_to_id("<|bos|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", bos)]
    )
    return tokenizer


def _plain(text: str) -> str:
    for token in SPECIAL:
        text = text.replace(token, "\n")
    return text


def config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": [token for token in SPECIAL if token not in ("<|pad|>", "<|bos|>", "<|end|>")],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }


def save(tokenizer: Tokenizer, folder: Path = MODEL_DIR) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config(), indent=2) + "\n")


if __name__ == "__main__":
    save(build(), Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL_DIR)
