"""vLLM's signals over its versions."""

from __future__ import annotations

import pytest

from backends.base import Measured, Priority, Sample, Signal
from tests.backends.recorded_engines import ENGINES, Page, adapter

RUNNING, WAITING, KV = Signal.RUNNING, Signal.WAITING, Signal.KV_USED_FRACTION


def gauge(name: str, value: object, *, engine: str = "0", model: str = "m") -> str:
    return f'vllm:{name}{{engine="{engine}",model_name="{model}"}} {value}\n'


async def sample_of(page: str, *, models: str = "") -> Sample:
    listed = f'{{"data":[{{"id":"{models}"}}]}}'
    backend, _ = adapter("vllm", {"/health": b"", "/v1/models": listed, "/metrics": page})
    if models:
        await backend.probe()
    return await backend.sample()


async def test_a_recorded_engine_says_all_of_it() -> None:
    backend, _ = adapter("vllm", ENGINES["vllm"])

    probe = await backend.probe()
    sample = await backend.sample()

    assert (probe.version, probe.models[0].id, probe.models[0].max_model_len) == ("0.32.0", "tiny", 2048)
    assert {signal.value: sample.value(signal) for signal in sample.values} == {
        "running": 4,
        "waiting": 8,
        "kv_used_fraction": pytest.approx(0.000488, abs=1e-6),
        "kv_capacity_tokens": 2097152,
        "kv_block_tokens": 128,
        "preemptions_total": 0,
        "prompt_tokens_total": 523,
        "generation_tokens_total": 476,
        "prefix_queries_total": 523,
        "prefix_hits_total": 0,
        "start_time_s": 1795969248.5,
        "asleep": 0,
        "rejected_total": 0,
    }


@pytest.mark.parametrize(
    ("page", "source"),
    [
        (gauge("kv_cache_usage_perc", 0.61), "vllm:kv_cache_usage_perc"),
        ('vllm:gpu_cache_usage_perc{model_name="m"} 0.61\n', "vllm:gpu_cache_usage_perc"),
        (gauge("gpu_cache_usage_perc", 0.0) + gauge("kv_cache_usage_perc", 0.61), "vllm:kv_cache_usage_perc"),
    ],
    ids=["new name", "old name", "old name stuck at 0 beside the new one"],
)
async def test_kv_use_is_read_under_each_version_s_name(page: str, source: str) -> None:
    assert (await sample_of(page)).values == {KV: Measured(0.61, source)}


async def test_neither_name_is_unknown() -> None:
    assert KV not in (await sample_of(gauge("num_requests_running", 3))).values


TWO_MODELS = "".join(
    gauge(name, value, engine=engine, model=model)
    for engine, model, running, waiting, used in (
        ("0", "m", 6, 4, 0.97),
        ("1", "m", 0, 0, 0.02),
        ("0", "other", 50, 9, 0.99),
    )
    for name, value in (
        ("num_requests_running", running),
        ("num_requests_waiting", waiting),
        ("kv_cache_usage_perc", used),
    )
)


async def test_data_parallel_engines_add_up_and_the_fullest_counts() -> None:
    sample = await sample_of(TWO_MODELS, models="m")

    assert (sample.value(RUNNING), sample.value(WAITING), sample.value(KV)) == (6, 4, 0.97)


async def test_a_series_that_is_told_twice_counts_once_and_one_that_contradicts_itself_is_unknown() -> None:
    page = gauge("num_requests_running", 3) + gauge("num_requests_waiting", 1) + gauge("kv_cache_usage_perc", 0.2)

    twice = await sample_of(page + page + gauge("num_requests_running", 2, engine="1"))
    torn = await sample_of(page + gauge("num_requests_waiting", 7) + gauge("kv_cache_usage_perc", 0.9))

    assert [twice.value(signal) for signal in (RUNNING, WAITING, KV)] == [5, 1, 0.2]
    assert [torn.value(signal) for signal in (RUNNING, WAITING, KV)] == [3, None, None]


async def test_without_a_model_list_every_model_on_the_page_counts() -> None:
    sample = await sample_of(TWO_MODELS)

    assert (sample.value(RUNNING), sample.value(WAITING), sample.value(KV)) == (56, 13, 0.99)


async def test_a_page_of_foreign_models_only_says_nothing() -> None:
    assert (await sample_of(TWO_MODELS, models="mine")).values == {}


async def test_a_series_without_a_model_label_is_the_engine_s() -> None:
    sample = await sample_of("vllm:num_requests_running 3\n", models="m")

    assert sample.value(RUNNING) == 3


@pytest.mark.parametrize("used", ["NaN", "-0.1", "1.01", "61"])
async def test_an_absurd_fraction_is_unknown(used: str) -> None:
    sample = await sample_of(gauge("kv_cache_usage_perc", used))

    assert sample.values == {KV: Measured(None, "vllm:kv_cache_usage_perc")}


async def test_one_absurd_engine_makes_the_sum_unknown() -> None:
    page = gauge("num_requests_running", 3) + gauge("num_requests_running", "NaN", engine="1")

    assert (await sample_of(page)).values == {RUNNING: Measured(None, "vllm:num_requests_running")}


async def test_swapped_requests_of_the_old_engine_wait() -> None:
    sample = await sample_of(gauge("num_requests_waiting", 2) + gauge("num_requests_swapped", 3))

    assert sample.value(WAITING) == 5


@pytest.mark.parametrize(
    ("labels", "capacity", "block"),
    [
        (['kv_cache_size_tokens="4096",block_size="16",num_gpu_blocks="9"'], 4096, 16),
        (['block_size="16",num_gpu_blocks="100"'], 1600, 16),
        (
            ['engine="0",block_size="16",num_gpu_blocks="100"', 'engine="1",block_size="16",num_gpu_blocks="50"'],
            2400,
            16,
        ),
        (['block_size="16",num_gpu_blocks="0"'], None, 16),
    ],
)
async def test_kv_capacity_is_read_from_labels(labels: list[str], capacity: float | None, block: float) -> None:
    sample = await sample_of("".join(f"vllm:cache_config_info{{{each}}} 1.0\n" for each in labels))

    assert sample.values == {
        Signal.KV_CAPACITY_TOKENS: Measured(capacity, "vllm:cache_config_info"),
        Signal.KV_BLOCK_TOKENS: Measured(block, "vllm:cache_config_info"),
    }


async def test_a_cache_that_is_not_sized_yet_has_no_capacity() -> None:
    sample = await sample_of('vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1.0\n')

    assert sample.values == {}


async def test_prefix_counters_are_read_under_the_old_name() -> None:
    sample = await sample_of(gauge("gpu_prefix_cache_queries_total", 9) + gauge("gpu_prefix_cache_hits_total", 4))

    assert (sample.value(Signal.PREFIX_QUERIES_TOTAL), sample.value(Signal.PREFIX_HITS_TOTAL)) == (9, 4)


VERSIONS = {
    "0.6 and 0.8 V0": ("gpu_cache_usage_perc", "", ("num_requests_swapped", "cpu_cache_usage_perc")),
    "0.8 V1": ("gpu_cache_usage_perc", 'engine="0",', ()),
    "0.9 and 0.10 V1": ("kv_cache_usage_perc", 'engine="0",', ("gpu_cache_usage_perc",)),
    "0.16 to 0.32": ("kv_cache_usage_perc", 'engine="0",', ()),
}


@pytest.mark.parametrize("version", VERSIONS)
async def test_each_version_serves_every_need_under_its_own_names(version: str) -> None:
    fraction, engine, stuck = VERSIONS[version]
    values = {
        "num_requests_running": 6,
        "num_requests_waiting": 4,
        fraction: 0.61,
        "prompt_tokens_total": 100,
        "generation_tokens_total": 50,
        "num_preemptions_total": 2,
        **dict.fromkeys(stuck, 0.0),
    }
    page = "".join(f'vllm:{name}{{{engine}model_name="m"}} {value}\n' for name, value in values.items())
    page += f'vllm:cache_config_info{{{engine}block_size="16",num_gpu_blocks="100"}} 1.0\n'

    sample = await sample_of(page, models="m")

    needs = (RUNNING, WAITING, KV, Signal.KV_CAPACITY_TOKENS, Signal.GENERATION_TOKENS_TOTAL, Signal.PREEMPTIONS_TOTAL)
    assert [sample.value(need) for need in needs] == [6, 4, 0.61, 1600, 50, 2]


@pytest.mark.parametrize("prefix", ["ray_vllm_", "ray_vllm:"])
async def test_ray_s_page_is_read_under_vllm_s_names(prefix: str) -> None:
    page = (gauge("num_requests_running", 3) + gauge("kv_cache_usage_perc", 0.2)).replace("vllm:", prefix)

    sample = await sample_of(page, models="m")

    assert (sample.value(RUNNING), sample.value(KV)) == (3, 0.2)


@pytest.mark.parametrize(("awake", "asleep"), [("1.0", 0), ("0.0", 1)])
async def test_an_engine_that_sleeps_says_so(awake: str, asleep: int) -> None:
    page = f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {awake}\n'
    page += 'vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 1.0\n'

    assert (await sample_of(page)).value(Signal.ASLEEP) == asleep


def served(**pages: str) -> dict[str, Page]:
    return {**ENGINES["vllm"], **{f"/{name}": page for name, page in pages.items()}}


async def test_a_developer_s_server_tells_its_seats_and_what_priority_means() -> None:
    info = '{"vllm_config":{"scheduler_config":{"policy":"priority","max_num_seqs":4}}}'
    pages = {**ENGINES["vllm"], "/server_info?config_format=json": info}
    told, untold = adapter("vllm", pages)[0], adapter("vllm", pages, priority=False)[0]

    for backend in (told, untold):
        await backend.probe()

    assert (await told.sample()).values[Signal.SEATS] == Measured(4, "/server_info max_num_seqs")
    assert told.capabilities.priority is Priority.LOWER_FIRST
    assert untold.capabilities.priority is None


async def test_an_engine_that_says_it_is_paused_is_not_ready() -> None:
    backend, _ = adapter("vllm", served(is_paused='{"is_paused":true}'))

    probe = await backend.probe()

    assert (probe.ready, probe.detail) == (False, "engine e1: it is paused; POST /resume to go on")


@pytest.mark.parametrize(("load", "known"), [(0, None), (3, 3)])
async def test_a_load_of_nothing_is_no_count(load: int, known: int | None) -> None:
    backend, _ = adapter("vllm", served(load=f'{{"server_load":{load}}}'))
    await backend.probe()

    assert (await backend.sample()).value(Signal.SERVER_LOAD) == known
