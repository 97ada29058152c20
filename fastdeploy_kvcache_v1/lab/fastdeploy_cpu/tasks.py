"""Read FastDeploy's tasks, duck-typed so that tests need no FastDeploy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...fastdeploy_integration.transport import TaskKind
from ..model.sampler import SamplingParams
from .batch_rows import BatchRows, FinishRules, RunningSequence

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (0, 1),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"), ()),
    "guided_json_object": (False,),
    "bad_words": ([],),
    "bad_words_token_ids": ([],),
    "logits_processors_args": ({},),
}
"""Request fields that this worker does not support, with the values beside None that ask for nothing."""


def unsupported(request: Any) -> str | None:
    """The first field of FastDeploy's `request` that this worker does not support."""
    for name, neutral in NEUTRAL.items():
        value = request.get(name)
        if isinstance(value, dict):  # FastDeploy adds its missing fields as None
            value = {key: each for key, each in value.items() if each is not None}
        if value is not None and value not in neutral:
            return name
    return None


def apply_task(table: BatchRows, task: Any) -> RunningSequence | None:
    """Apply one task of a batch. Returns the sequence of a prefill task. Raises `CacheStateError` for a wrong range."""
    row = int(task.idx)
    kind = TaskKind(task.task_type.value)
    if kind is TaskKind.PREFILL:
        sequence = _sequence(task)
        table.start(row, sequence)
        return sequence
    if kind is TaskKind.DECODE:
        table.set_blocks(row, [int(block) for block in task.block_tables])
    else:  # FastDeploy's GPU worker also treats an extend task as the end of the row
        table.release(row)
    return None


def _sequence(task: Any) -> RunningSequence:
    prompt = [int(token) for token in task.prompt_token_ids]
    return RunningSequence(
        request_id=task.request_id,
        tokens=prompt + [int(token) for token in task.output_token_ids],
        prompt_length=len(prompt),
        computed=int(task.prefill_start_index),
        target=int(task.prefill_end_index),
        block_table=[int(block) for block in task.block_tables],
        rules=_finish_rules(task),
        sampling=sampling_params(task),
    )


def _finish_rules(task: Any) -> FinishRules:
    return FinishRules(
        end_tokens=tuple(int(token) for token in task.eos_token_ids),
        max_tokens=int(task.get("max_tokens") or 1 << 30),
        min_tokens=int(task.get("min_tokens") or 0),
        stop_sequences=_stop_sequences(task.get("stop_token_ids"), task.get("stop_seqs_len")),
    )


def _stop_sequences(
    padded: Sequence[Sequence[int]] | None, lengths: Sequence[int] | None
) -> tuple[tuple[int, ...], ...]:
    """`padded`: FastDeploy pads stop sequences to one length."""
    if not padded or not lengths:
        return ()
    return tuple(tuple(row[:length]) for row, length in zip(padded, lengths, strict=False) if length)


def sampling_params(task: Any) -> SamplingParams:
    temperature, top_p, seed = task.get("temperature"), task.get("top_p"), task.get("seed")
    return SamplingParams(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=min(1.0, float(top_p)) if top_p else 1.0,
        top_k=int(task.get("top_k") or 0),  # FastDeploy makes 1 of temperature 0
        min_p=float(task.get("min_p") or 0.0),
        seed=int(seed or 0),
    )
