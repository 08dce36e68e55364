"""Trains niwaki-tiny from the generator alone, and exports it.

    python -m niwaki.runtime.bundled.train --run DIR [--tokens 60e6]     train, or go on from DIR's checkpoint
    python -m niwaki.runtime.bundled.train --run DIR --start FOLDER      a new run that begins with FOLDER's weights
    python -m niwaki.runtime.bundled.train --run DIR --export [FOLDER]   write the Hugging Face folder

One process a core works on each step; the memory of weights and gradients is shared, and whoever is free takes the next
few rows, so a busy core slows a step only by its share. docs/model.md says how long it takes. DIR/plan.json may change
the plan while it runs (`tokens`, `mix`, ...). The data are seeded; which worker sees which rows depends on the load.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from niwaki.runtime.bundled import MODEL_DIR
from niwaki.runtime.bundled.batches import NO_NOTE, Batch, Packer, Row, batch, belongings, repeats
from niwaki.runtime.bundled.generator import MIX
from niwaki.runtime.bundled.network import Network, Shape, hf_config, hf_tensors, masters_of
from niwaki.runtime.bundled.optimizer import Optimizer
from niwaki.runtime.bundled.tokenizer import build, save
from niwaki.runtime.bundled.trials import FAR_TASKS, TRIALS, Trial, trials

SHORT, MIDDLE, LONG = (3, 256), (2, 384), (1, 2048)  # rows taken at once, and their length
WARM_STEPS = 100  # slow enough that the planted heads survive
REPORT_EVERY, SAVE_EVERY = 50, 200


@dataclass
class Plan:
    """What of the run may change while it runs; shares of `tokens` say when each phase starts."""

    tokens: float = 60e6
    matrix_rate: float = 0.009  # of Muon
    other_rate: float = 0.001  # of Adam
    step_tokens: int = 3000  # a step takes rows until it has as many
    induction_until: float = 0.05
    middle_from: float = 0.35
    long_from: float = 0.6
    decay_from: float = 0.5
    long: float = 0.12  # share of the draws that are rows of 2,048 tokens, once they start
    notes: float = 0.5  # weight of a note against an answer's token
    belongings: float = 0.05  # share of the rows that teach notes alone
    eval_every: int = 400
    mix: dict[str, float] = field(default_factory=lambda: dict(MIX))

    @classmethod
    def read(cls, path: Path, tokens: float) -> Plan:
        plan = cls(tokens=tokens)
        if path.exists():
            for key, value in json.loads(path.read_text()).items():
                setattr(plan, key, value)
        return plan

    def rate(self, tokens: int, step: int) -> float:
        left = (1 - tokens / self.tokens) / (1 - self.decay_from)
        return max(0.0, min(1.0, left, (step + 1) / WARM_STEPS))


class Run:
    """What all workers share: weights, moments, gradients, counters; and the folder of the run."""

    def __init__(
        self, folder: Path, tokens: float, seed: int, workers: int, device: str, start: Path | None = None
    ) -> None:
        self.folder, self.first_tokens, self.seed, self.workers, self.device = folder, tokens, seed, workers, device
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer = load_tokenizer()
        self.network = Network(Shape()).to(device).bfloat16()
        self.optimizer = Optimizer(self.network, seed, shared=workers > 1)
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.checkpoint = folder / "checkpoint.safetensors"
        if self.checkpoint.exists():
            state = load_file(self.checkpoint, device=device)
            self.optimizer.load(state)
            self.step, self.tokens, self.seconds = int(state["step"]), int(state["tokens"]), float(state["seconds"])
        elif start:
            weights = masters_of(load_file(start / "model.safetensors", device=device), self.network.shape)
            self.optimizer.begin(weights)
        self.optimizer.publish(self.network, self.optimizer.masters)
        self.gradients = [
            {name: torch.zeros_like(master) for name, master in self.optimizer.masters.items()} for _ in range(workers)
        ]
        self.sums = torch.zeros(workers, 2)  # loss and weight of a step
        self.scores = torch.zeros(len(TRIALS) + len(FAR_TASKS))
        if workers > 1:
            self.network.share_memory()
            self.sums.share_memory_()  # type: ignore[no-untyped-call]
            self.scores.share_memory_()  # type: ignore[no-untyped-call]
            for gradients in self.gradients:
                for gradient in gradients.values():
                    gradient.share_memory_()  # type: ignore[no-untyped-call]
        context = multiprocessing.get_context("fork")
        self.taken = context.Value("q", 0)  # tokens of this step that some worker has taken
        self.barrier = context.Barrier(workers)

    def plan(self) -> Plan:
        return Plan.read(self.folder / "plan.json", self.first_tokens)

    def save(self) -> None:
        counters = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}
        kept = {**self.optimizer.state(), **{name: torch.tensor(value) for name, value in counters.items()}}
        save_file(kept, self.checkpoint.with_suffix(".new"))
        os.replace(self.checkpoint.with_suffix(".new"), self.checkpoint)

    def log(self, line: str) -> None:
        stamped = f"{time.strftime('%H:%M:%S', time.gmtime())} {line}"
        print(stamped, flush=True)
        with (self.folder / "log.txt").open("a") as file:
            file.write(stamped + "\n")


class Worker:
    """One process of a run. Worker 0 also reports and saves."""

    def __init__(self, run: Run, rank: int, compiled: bool) -> None:
        self.run, self.rank, self.plan = run, rank, run.plan()
        self.rng = random.Random(run.seed * 1_000_003 + run.step * 1009 + rank)
        seeds = [self.rng.randrange(1 << 40) for _ in range(3)]
        self.short = Packer(run.tokenizer, seeds[0], SHORT[1])
        self.middle = Packer(run.tokenizer, seeds[1], MIDDLE[1])
        self.long = Packer(run.tokenizer, seeds[2], LONG[1], far=0.5, pool=24)
        network = run.network
        self.forward: Network = torch.compile(network, dynamic=False) if compiled else network  # type: ignore[assignment]
        layers = {name: int(name.split(".")[1]) if name.startswith("blocks.") else 0 for name in run.optimizer.masters}
        self.owned = [name for name, layer in layers.items() if layer % run.workers == rank]

    def work(self) -> None:
        run = self.run
        losses: list[float] = []
        started, since = time.time(), run.tokens
        while run.tokens < self.plan.tokens:
            losses.append(self.step())
            if run.step % REPORT_EVERY == 0:
                spent, started = time.time() - started, time.time()
                run.seconds += spent
                speed, since = (run.tokens - since) / spent, run.tokens
                if self.rank == 0:
                    left = (self.plan.tokens - run.tokens) / speed / 60
                    run.log(
                        f"step {run.step} tokens {run.tokens / 1e6:.2f}M loss {sum(losses) / len(losses):.4f} "
                        f"{speed:.0f} tokens/s rate {self.plan.rate(run.tokens, run.step):.2f} {left:.0f} min left"
                    )
                losses = []
                self.plan = run.plan()
            if run.step % SAVE_EVERY == 0 and self.rank == 0:
                run.save()
            if run.step % self.plan.eval_every == 0:
                self.evaluate(48)
        if self.rank == 0:
            run.save()
        self.evaluate(200)

    def step(self) -> float:
        """Take rows until the step is full, wait for the others, update what this worker owns, wait again."""
        run, mine = self.run, self.run.gradients[self.rank]
        torch._foreach_zero_(list(mine.values()))
        run.sums[self.rank] = 0
        while True:
            packer, rows = self.kind()
            size = rows * packer.length
            with run.taken.get_lock():
                if run.taken.value >= self.plan.step_tokens:
                    break
                run.taken.value += size
            self.learn(self.draw(packer, rows), mine)
        run.barrier.wait(600)
        taken, loss, weight = int(run.taken.value), float(run.sums[:, 0].sum()), float(run.sums[:, 1].sum())
        scale = self.plan.rate(run.tokens, run.step)
        with torch.no_grad():
            total = {
                name: sum((part[name] for part in run.gradients[1:]), run.gradients[0][name]) / weight
                for name in self.owned
            }
        run.optimizer.step(run.network, total, self.plan.matrix_rate * scale, self.plan.other_rate * scale)
        run.step += 1
        run.tokens += taken
        run.barrier.wait(600)
        run.taken.value = 0  # both have read it, and nobody takes rows before it zeroed its own gradients
        run.barrier.wait(600)
        return loss / weight

    def kind(self) -> tuple[Packer, int]:
        done = self.run.tokens / self.plan.tokens
        if done >= self.plan.long_from and self.rng.random() < self.plan.long:
            return self.long, LONG[0]
        return (self.middle, MIDDLE[0]) if done >= self.plan.middle_from else (self.short, SHORT[0])

    def draw(self, packer: Packer, count: int) -> Batch:
        share = 0.5 if self.run.tokens < self.plan.induction_until * self.plan.tokens else 0.05
        if packer is self.long:
            share = 0.0
        vocabulary = self.run.network.shape.vocabulary

        def row() -> Row:
            kind = self.rng.random()
            if kind < share:
                return repeats(self.rng, vocabulary, packer.length)
            if kind < share + self.plan.belongings and packer is not self.long:
                return belongings(self.rng, vocabulary, packer.length)
            return packer.next_row(self.plan.mix)

        return batch([row() for _ in range(count)], packer.length)

    def learn(self, made: Batch, gradients: dict[str, Tensor]) -> None:
        """Add the gradients of these rows; the loss is computed where it has weight and nowhere else."""
        run = self.run
        ids = torch.from_numpy(made.ids).to(run.device)
        weights = torch.from_numpy(made.weights[:, 1:]).to(run.device).reshape(-1)
        cos, sin = run.network.angles(torch.from_numpy(made.positions).to(run.device))
        hidden, noted = self.forward(ids, cos, sin)
        places = weights.nonzero().squeeze(1)
        logits = F.linear(hidden[:, :-1].flatten(0, 1)[places], run.network.embed).float()
        losses = F.cross_entropy(logits, ids[:, 1:].reshape(-1)[places], reduction="none")
        loss = (losses * weights[places]).sum()
        notes = torch.from_numpy(made.notes).to(run.device).flatten()
        places = (notes != NO_NOTE).nonzero().squeeze(1)
        logits = F.linear(noted.flatten(0, 1)[places], run.network.embed).float()
        aside = self.plan.notes * F.cross_entropy(logits, notes[places], reduction="sum")
        ((loss + aside) / made.ids.size).backward()  # type: ignore[no-untyped-call]
        for name, parameter in run.network.named_parameters():
            assert parameter.grad is not None
            gradients[name].add_(parameter.grad, alpha=made.ids.size)
            parameter.grad = None
        run.sums[self.rank] += torch.tensor([float(loss.detach()), float(weights.sum())])

    def evaluate(self, count: int) -> None:
        """Exact match on the test side; the workers share the tasks."""
        run, begun = self.run, time.time()
        far = run.tokens > self.plan.tokens * (self.plan.long_from - 0.1)
        asked = [(task, count, 0.0) for task in TRIALS] + [(task, 16, 1.0) for task in FAR_TASKS if far]
        wrong: dict[str, list[str]] = defaultdict(list)
        for index, (task, number, share) in enumerate(asked):
            if index % run.workers == self.rank:
                label = f"{task}/far" if share else task
                run.scores[index] = self.score(trials(task, number, seed=1, far=share), wrong[label])
        with (run.folder / f"wrong.{self.rank}.txt").open("w") as file:
            for label, lines in wrong.items():
                file.write("".join(f"[{label}] {line}\n" for line in lines[:12]))
        run.barrier.wait(600)
        if self.rank == 0:
            shown = [f"{task}{'/far' if share else ''} {run.scores[i]:.0%}" for i, (task, _, share) in enumerate(asked)]
            run.log(f"EVAL step {run.step} {' | '.join(shown)} ({time.time() - begun:.0f} s)")

    @torch.no_grad()
    def score(self, asked: list[Trial], wrong: list[str]) -> float:
        """Greedy output equals the expected one where every expected token is the likeliest: one pass tells."""
        run, right = self.run, 0
        for trial in asked:
            good = True
            for prompt, expected in trial.checks:
                before = run.tokenizer.encode(prompt, add_special_tokens=False).ids
                answer = run.tokenizer.encode(expected, add_special_tokens=False).ids
                ids = torch.tensor([before + answer], device=run.device)
                cos, sin = run.network.angles(torch.arange(ids.shape[1], device=run.device)[None])
                hidden, _ = run.network(ids, cos, sin)
                best = F.linear(hidden[0, len(before) - 1 : -1], run.network.embed).argmax(-1).tolist()
                if best != answer:
                    said = run.tokenizer.decode(best, skip_special_tokens=False)
                    wrong.append(f"{prompt[-600:]!r}\n    expected {expected!r}\n    said     {said!r}")
                    good = False
                    break
            right += good
        return right / len(asked)


def train(run: Run, compiled: bool) -> None:
    """Fork the workers and be the first of them."""

    def start(rank: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()  # Linux shares a core by session first: a worker is to count as much as any other program
        torch.set_num_threads(1)
        Worker(run, rank, compiled).work()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the other workers are ended too
    others = [
        multiprocessing.get_context("fork").Process(target=start, args=(rank,), daemon=True)
        for rank in range(1, run.workers)
    ]
    for other in others:
        other.start()
    Worker(run, 0, compiled).work()
    for other in others:
        other.join()


def load_tokenizer() -> Tokenizer:
    """The tokenizer of the model folder; trained first where there is none."""
    path = MODEL_DIR / "tokenizer.json"
    if not path.exists():
        save(build())
    return Tokenizer.from_file(str(path))


def export(run: Run, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = hf_tensors(run.optimizer.masters, run.network.shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(hf_config(run.network.shape), indent=2) + "\n")
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if folder != MODEL_DIR:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((MODEL_DIR / name).read_bytes())
    run.log(f"exported step {run.step}, {run.tokens / 1e6:.2f}M tokens, to {folder.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run: checkpoint, log, plan")
    parser.add_argument("--tokens", type=float, default=60e6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start", type=Path, help="begin with the weights of this folder (an export)")
    parser.add_argument("--workers", type=int, help="processes; default: one a core, or one for a GPU")
    parser.add_argument("--export", type=Path, nargs="?", const=MODEL_DIR, help="write the model folder and stop")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    workers = options.workers or (1 if device == "cuda" else os.cpu_count() or 1)
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    run = Run(options.run, options.tokens, options.seed, 1 if options.export else workers, device, options.start)
    if options.export:
        export(run, options.export)
    else:
        train(run, compiled=not options.eager)


if __name__ == "__main__":
    main()
