"""Speed of the lab's CPU model over Hugging Face transformers, prefill and decode of the same weights in float32.
Each runs in a process, in turns; time is CPU time for one thread, and wall time for more.

PYTHON is an interpreter with transformers and torch (default: the running one). Without them only the times of the
CPU model are reported.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the interpreter of transformers lacks the package

from _support import ROOT, begin, median, sized

PROMPT_TOKENS = sized(2188, 130)
DECODE_BEHIND = (64, PROMPT_TOKENS)
DECODE_TOKENS = 10

Work = Callable[[str], None]
"""Does work of one name: "prefill", or "decode behind P"."""


def works() -> list[str]:
    return ["prefill", *(f"decode behind {position}" for position in DECODE_BEHIND)]


def tokens(vocab_size: int) -> list[int]:
    return [(7919 * i + 13) % vocab_size for i in range(PROMPT_TOKENS)]


def ours(path: Path, num_threads: int) -> tuple[Work, int]:
    sys.path.insert(0, str(ROOT))
    from fastdeploy_kvcache_v1.lab.model import configure_reproducible_math, load_model_config

    configure_reproducible_math(num_threads)
    import numpy as np
    import paddle

    from fastdeploy_kvcache_v1.lab.model.llama import Llama
    from fastdeploy_kvcache_v1.lab.model.step import SequenceSlice

    config = load_model_config(path)
    decoder = Llama.load(path, config)
    table = list(range(-(-(PROMPT_TOKENS + DECODE_TOKENS) // 64)))
    shape = [len(table), config.num_kv_heads, 64, config.head_dim]
    caches = [paddle.zeros(shape) for _ in range(2 * config.num_layers)]
    ids = np.array(tokens(config.vocab_size))

    def work(name: str) -> None:
        if name == "prefill":
            decoder.forward([SequenceSlice(ids, 0, table)], caches)
            return
        start = int(name.split()[-1])
        for position in range(start, start + DECODE_TOKENS):
            decoder.forward([SequenceSlice(ids[:1], position, table)], caches)

    return work, num_threads


def transformers(path: Path, num_threads: int) -> tuple[Work, int]:
    os.environ["OMP_NUM_THREADS"] = str(num_threads)
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(False)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.tensor([tokens(model.config.vocab_size)])
    caches: dict[str, Any] = {}

    def prefill(count: int) -> Any:
        return model(ids[:, :count], use_cache=True, logits_to_keep=1).past_key_values

    def work(name: str) -> None:
        if name == "prefill":
            prefill(PROMPT_TOKENS)
            return
        past = caches[name]
        for _ in range(DECODE_TOKENS):
            past = model(ids[:, :1], past_key_values=past, use_cache=True).past_key_values
        past.crop(-DECODE_TOKENS)

    for name in works()[1:]:
        caches[name] = prefill(int(name.split()[-1]))
    return work, num_threads


def child(contender: str, path: Path, num_threads: int) -> None:
    """Do the work named on each line of standard input, and print its CPU time and wall time."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the libraries print to standard output
    work, _ = {"ours": ours, "transformers": transformers}[contender](path, num_threads)
    for name in works():
        work(name)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        work(line.strip())
        print(time.process_time() - cpu, time.perf_counter() - wall, file=answers, flush=True)


class Contender:
    """A child process and its times, `(CPU seconds, wall seconds)` per turn."""

    def __init__(self, python: str, name: str, path: Path, num_threads: int) -> None:
        self.name, self.num_threads = name, num_threads
        self.times: dict[str, list[tuple[float, float]]] = {work: [] for work in works()}
        self._process = subprocess.Popen(
            [python, __file__, str(path), "--child", name, "--threads", str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def is_ready(self) -> bool:
        """Wait for the process. False: it ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline() == "ready\n"

    def measure(self, work: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(work, file=self._process.stdin, flush=True)
        cpu, wall = map(float, self._process.stdout.readline().split())
        self.times[work].append((cpu, wall))

    def median_s(self, work: str) -> dict[str, float]:
        """Per prompt or per token."""
        divisor = 1 if work == "prefill" else DECODE_TOKENS
        cpu, wall = (median(values) / divisor for values in zip(*self.times[work], strict=True))
        return {"cpu": cpu, "wall": wall}

    def close(self) -> None:
        self._process.communicate()


def compare(path: Path, python: str, num_threads: int, turns: int) -> dict[str, Any]:
    contenders = [Contender(sys.executable, "ours", path, num_threads)]
    if not contenders[0].is_ready():
        sys.exit(f"error: the CPU model cannot load {path}: {__file__} {path} --child ours --threads 1 prints why")
    reference = Contender(python, "transformers", path, num_threads)
    if reference.is_ready():
        contenders.append(reference)
    else:
        print(
            f"transformers is left out: {python} {__file__} {path} --child transformers --threads 1 prints why",
            file=sys.stderr,
        )
    for _ in range(turns):
        for work in works():
            for contender in contenders:
                contender.measure(work)
    result: dict[str, Any] = {c.name: {work: c.median_s(work) for work in works()} for c in contenders}
    if reference in contenders:
        clock = "cpu" if num_threads == 1 else "wall"
        result["speed_over_transformers"] = {
            work: reference.median_s(work)[clock] / contenders[0].median_s(work)[clock] for work in works()
        }
    for contender in contenders:
        contender.close()
    return result


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--transformers", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--turns", type=int, default=sized(7, 1))
    parser.add_argument("--threads", type=int, nargs="+", default=sized([1, 2], [1]))


def main() -> None:
    if "--child" in sys.argv:
        model, _, contender, _, threads = sys.argv[1:]
        child(contender, Path(model), int(threads))
        return
    run = begin(configure=configure)
    options = run.options
    by_threads = {str(n): compare(options.model, options.transformers, n, options.turns) for n in options.threads}
    run.save({"model": options.model.name, "prompt_tokens": PROMPT_TOKENS, "threads": by_threads})


if __name__ == "__main__":
    main()
