"""llama.cpp's server as a peer: a folder of a Llama as GGUF, a process of the server, and requests to it by HTTP.

Weights stay in bfloat16, as everybody's here, or are rounded by GGUF's own package; the cache is of two bytes a number.
There is a slot for each of 32 requests; a prompt goes to the slot that holds most of its beginning, and what a slot
holds is not computed again.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SLOTS = 32
CONTEXT = 65_536  # tokens in all slots: as many as the others have
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
ROUNDED = {"int8": gguf.GGMLQuantizationType.Q8_0, "int4": gguf.GGMLQuantizationType.Q4_0}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class Server:
    """One server process; `close` ends it."""

    def __init__(self, file: Path, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [
            str(Path(sys.executable).parent / "llama-server"),
            *("--model", str(file), "--host", "127.0.0.1", "--port", str(self._port)),
            *("--threads", str(threads), "--threads-http", str(SLOTS), "--parallel", str(SLOTS)),
            *("--ctx-size", str(CONTEXT), "--flash-attn", "on", "--no-webui"),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._kept = threading.local()
        self._threads = ThreadPoolExecutor(SLOTS)
        while not self._is_ready():
            if self._process.poll() is not None:
                raise SystemExit(f"llama-server ended with {self._process.returncode}")
            time.sleep(0.02)

    def complete(self, wave: list[tuple[list[int], int]]) -> list[list[int]]:
        """The ids of each answer; as many requests at once as there are slots, in order."""
        return list(self._threads.map(lambda request: self._one(*request), wave))

    def close(self) -> None:
        self._threads.shutdown()
        self._process.terminate()
        self._process.wait()

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _one(self, ids: list[int], count: int) -> list[int]:
        if not hasattr(self._kept, "connection"):
            self._kept.connection = http.client.HTTPConnection("127.0.0.1", self._port)
        asked = {
            "prompt": ids,
            "n_predict": count,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
        }
        self._kept.connection.request("POST", "/completion", json.dumps(asked), {"Content-Type": "application/json"})
        answer = self._kept.connection.getresponse()
        body = json.loads(answer.read())
        if answer.status != 200:
            raise SystemExit(f"llama-server: {body}")
        tokens: list[int] = body["tokens"]
        return tokens


def llama_server(model: str, weights: str) -> Iterator[Server]:
    """Servers without a cached token, one after another: the one before ends when the next is asked for."""
    file = Path(tempfile.mkdtemp(), "model.gguf")
    write_gguf(Path(model), file, weights)
    while True:
        server = Server(file, int(os.environ["OMP_NUM_THREADS"]))
        try:
            yield server
        finally:
            server.close()


def write_gguf(folder: Path, file: Path, weights: str) -> None:
    """A Llama in bfloat16 as GGUF, with a vocabulary of names that nobody reads; its matrices in int8, in int4 with
    embeddings and head in int8, or as they are."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_vocabulary(writer, config["vocab_size"])
    for name, bits in _tensors(folder / "model.safetensors"):
        if name in NAMES:
            named = NAMES[name]
        else:
            _, _, number, part = name.removesuffix(".weight").split(".", 3)
            named = f"blk.{number}.{PARTS[part]}.weight"
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                bits = _interleaved(bits, heads if part == "self_attn.q_proj" else kv_heads)
        if bits.ndim == 1:  # norms are float32 there
            writer.add_tensor(named, _floats(bits))
        elif weights in ROUNDED:
            kind = ROUNDED[weights if named.startswith("blk.") else "int8"]
            writer.add_tensor(named, gguf.quants.quantize(_floats(bits), kind), raw_dtype=kind)
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(named, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(file: Path) -> Iterator[tuple[str, Array]]:
    """Names and the bits of bfloat16 numbers (https://github.com/huggingface/safetensors#format)."""
    data = np.memmap(file, np.uint8, "r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    for name, about in json.loads(data[8:start].tobytes()).items():
        if name != "__metadata__":
            assert about["dtype"] == "BF16", f"{name} is {about['dtype']}"
            first, last = about["data_offsets"]
            yield name, np.array(data[start + first : start + last]).view(np.uint16).reshape(about["shape"])


def _floats(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _interleaved(bits: Array, heads: int) -> Array:
    """Rows of a head as GGUF has them: the two numbers that rope turns together stand side by side."""
    rows, width = bits.shape
    return bits.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    special = {0: "<unk>", 1: "<s>", 2: "</s>"}
    names, kinds = [], []
    for i in range(size):
        is_byte = 3 <= i < 259
        names.append(special.get(i, f"<0x{i - 3:02X}>" if is_byte else f"w{i}"))
        kind = gguf.TokenType.CONTROL if i in special else gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL
        kinds.append(int(kind))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
