"""Tasks shaped like FastDeploy's, without FastDeploy."""

from types import SimpleNamespace

PREFILL, DECODE, PREEMPTED, EXTEND, ABORT = range(5)


class Task(SimpleNamespace):
    def get(self, name, default=None):
        return getattr(self, name, default)


def prefill(row, name, prompt, blocks, *, start=0, end=None, outputs=(), **sampling):
    end = len(prompt) + len(outputs) if end is None else end
    return Task(
        idx=row,
        request_id=name,
        task_type=SimpleNamespace(value=PREFILL),
        prompt_token_ids=list(prompt),
        output_token_ids=list(outputs),
        prefill_start_index=start,
        prefill_end_index=end,
        block_tables=list(blocks),
        eos_token_ids=[1],
        ic_req_data=None,
        disaggregate_info=None,
        **{"max_tokens": 20, "temperature": 1, "top_k": 1, "seed": 3, **sampling},
    )


def other(kind, row, name, blocks=()):
    return Task(idx=row, request_id=name, task_type=SimpleNamespace(value=kind), block_tables=list(blocks))
