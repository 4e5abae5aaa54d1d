"""What the gateway's own metrics page says of one model, small enough to subtract and compare."""

from __future__ import annotations

from collections import Counter

from tests.end_to_end.gateway_process import GatewayProcess

_SUMS = {
    "headrace_prompt_tokens_total": "prompt",
    "headrace_output_tokens_total": "output",
    "headrace_ttft_seconds_count": "first_tokens",
}


async def counts(gateway: GatewayProcess, model: str) -> Counter[str]:
    """Tokens, first tokens and works by result; subtract an earlier one to see what a test did."""
    found: Counter[str] = Counter()
    for series, value in (await gateway.metrics()).items():
        name, _, labels = series.partition("{")
        if f'model="{model}"' not in labels:
            continue
        if name in _SUMS:
            found[_SUMS[name]] += int(value)
        elif name == "headrace_requests_total":
            found[labels.partition('result="')[2].partition('"')[0]] += int(value)
    return found
