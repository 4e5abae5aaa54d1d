"""One row a request: what a replay keeps, so that anybody can compute every figure again.

Times are seconds since the start of the replay; a time that never came is empty. `prompt_tokens` and `output_tokens`
are what was served: an answer cut short by the end of the replay has the tokens that it had by then, outcome
`unfinished`, and its prompt counts as served once the first token has shown. `wasted_tokens` are the prompts
and answers of attempts that were given up or failed.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

COLUMNS = (
    "arrival_s", "class", "tenant", "prompt_tokens", "output_tokens", "engine", "sent_s", "first_token_s", "end_s",
    "outcome", "wasted_tokens",
)  # fmt: skip
COMPLETED = "completed"
UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class Row:
    """See the module header. engine "" and sent_s None: never granted."""

    arrival_s: float
    class_name: str
    tenant: str
    prompt_tokens: int
    output_tokens: int
    engine: str
    sent_s: float | None
    first_token_s: float | None
    end_s: float
    outcome: str
    wasted_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Accepted to first token; None when there was none."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def served_tokens(self) -> int:
        """Prompt and answer, as far as they were served; an answer that broke off served nobody."""
        broken = self.outcome not in {COMPLETED, UNFINISHED}
        return self.prompt_tokens + self.output_tokens if self.first_token_s is not None and not broken else 0

    def served_by(self, at_s: float) -> float:
        """Of `served_tokens`, those of before then: the prompt with the first token, the answer evenly over its time."""
        if self.first_token_s is None or self.first_token_s > at_s or not self.served_tokens:
            return 0.0
        if self.end_s <= at_s:
            return self.served_tokens
        return self.prompt_tokens + self.output_tokens * (at_s - self.first_token_s) / (self.end_s - self.first_token_s)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows by arrival; equal rows give equal bytes."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in sorted(rows, key=lambda row: (row.arrival_s, row.class_name, row.tenant, row.end_s)):
            times = ("" if time_s is None else f"{time_s:.6f}" for time_s in (row.sent_s, row.first_token_s, row.end_s))
            sizes = (row.prompt_tokens, row.output_tokens)
            who = (f"{row.arrival_s:.6f}", row.class_name, row.tenant)
            writer.writerow((*who, *sizes, row.engine, *times, row.outcome, row.wasted_tokens))


def read_rows(path: Path) -> list[Row]:
    """What `write_rows` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Row(
                arrival_s=float(one["arrival_s"]),
                class_name=one["class"],
                tenant=one["tenant"],
                prompt_tokens=int(one["prompt_tokens"]),
                output_tokens=int(one["output_tokens"]),
                engine=one["engine"],
                sent_s=float(one["sent_s"]) if one["sent_s"] else None,
                first_token_s=float(one["first_token_s"]) if one["first_token_s"] else None,
                end_s=float(one["end_s"]),
                outcome=one["outcome"],
                wasted_tokens=int(one["wasted_tokens"]),
            )
            for one in csv.DictReader(file)
        ]
