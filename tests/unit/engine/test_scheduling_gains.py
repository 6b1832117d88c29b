"""What the scheduler is for, counted: steps saved by continuous batching, prefix hits by longest prefix first."""

from pathlib import Path

from fakes.model import write_tiny_model

from bench.engine_scheduling import AGE_CAP_S, NEVER, SleepingRunner, batching, crowd_run, length_run, memory_run, prefix_run, requests_of, varied_lengths
from engine.config import EngineConfig


def test_continuous_batching_saves_a_third_of_the_steps_of_static_batching(tmp_path: Path) -> None:
    requests = requests_of(varied_lengths(64, mean=24), num_prompt=32)
    outcome = batching(write_tiny_model(tmp_path / "model"), SleepingRunner(0, 0), EngineConfig(max_num_seqs=8), 512, requests)
    assert outcome["static_steps"] >= 1.5 * outcome["continuous_steps"]


def test_longest_prefix_first_finds_more_and_overtakes_nobody_past_the_cap() -> None:
    fcfs, lpm, uncapped = prefix_run("fcfs", AGE_CAP_S), prefix_run("lpm", AGE_CAP_S), prefix_run("lpm", NEVER)
    assert lpm.hit_rate > 1.3 * fcfs.hit_rate
    assert lpm.overtaken_past_cap == fcfs.overtaken_past_cap == 0 < uncapped.overtaken_past_cap


def test_memory_kept_for_expected_lengths_makes_preemption_rare() -> None:
    full, kept = memory_run(0.0), memory_run(1.0)
    assert kept["preemptions"] < full["preemptions"] / 4 and kept["tokens"] < 1.05 * kept["tokens_needed"] < full["tokens"]


def test_a_crowd_of_another_tenant_or_a_lower_class_hardly_delays_a_few() -> None:
    """Virtual time: 0.02 s a step and 0.0005 s a token, so figures are exact."""
    alone, equals, tenant, lower = crowd_run(0), crowd_run(10), crowd_run(10, tenant="crowd"), crowd_run(10, tenant="crowd", priority=1)
    assert lower["p99_s"] < 2 * alone["p99_s"] and tenant["p99_s"] < equals["p99_s"] / 10


def test_shortest_predicted_first_ends_answers_sooner_on_average() -> None:
    fcfs, shortest = length_run("fcfs"), length_run("shortest_predicted")
    assert shortest["mean_s"] < 0.75 * fcfs["mean_s"] and shortest["p99_s"] < 1.1 * fcfs["p99_s"]
