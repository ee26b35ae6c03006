"""Steps in which every rank sends its result to the first rank, which answers each: plans, commits, errors, as JSON.

    every rank --result or error--> first rank --this rank's answer, or one error for all--> every rank

Pickles would do, too, but unpickling executes code from other ranks. JSON is read as data.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from zcomm import ZcommError, control


def on_first_rank(
    call: Callable[[], Any],
    answers_of: Callable[[list[Any]], list[Any]],
    group: dist.ProcessGroup | None,
    kind: type[ZcommError],
) -> Any:
    """Call ``call`` on every rank and ``answers_of`` on the first, with all results in rank order; return its answer.

    Args:
        call: Must not communicate; its result is JSON.
        answers_of: Returns one answer for each rank, as JSON.
        group: The ranks; None: this process alone.
        kind: The class of errors.

    Raises:
        ZcommError: A ``kind``: the error of the first rank whose ``call`` failed, or of ``answers_of``; on all ranks.
    """
    texts = control.texts_to_first(_outcome(call, kind), group)
    answers = []
    if texts:
        of_ranks = [json.loads(text) for text in texts]
        failed = [text for text, outcome in zip(texts, of_ranks, strict=True) if "error" in outcome]
        total = failed[0] if failed else _outcome(lambda: answers_of([outcome["value"] for outcome in of_ranks]), kind)
        outcome = json.loads(total)
        answers = (
            [total] * len(texts) if "error" in outcome else [json.dumps({"value": value}) for value in outcome["value"]]
        )
    answer = json.loads(control.text_from_first(answers, group))
    if "error" in answer:
        raise kind(answer["error"])
    return answer["value"]


def _outcome(call: Callable[[], Any], kind: type[ZcommError]) -> str:
    """The result of ``call``, or its error, as JSON. It is sent in any case: the other ranks wait for it."""
    try:
        return json.dumps({"value": call()})
    except kind as error:
        return json.dumps({"error": str(error)})
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})
