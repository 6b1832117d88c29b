"""Settings of an engine: model numerics, block pool, step budget."""

from typing import Annotated, Literal

import msgspec


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`adapters`: name -> PEFT folder, loaded at the start. `max_loaded`: how many at once, those loaded later included."""

    adapters: dict[str, str] = {}
    max_loaded: int = 16
    max_rank: int = 64


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`weights`: how matrices are held; "auto" is `dtype` itself. `max_num_batched_tokens`: tokens of one step, over all sequences;
    `chunk_tokens`: of one sequence in one step.
    `attention`, `runner` and `admission` are rows of engine.attention.ATTENTION, engine.runner.RUNNERS and engine.admission.ADMISSION. `age_cap_s`: so
    long may others of the same class and tenant be preferred to a waiting sequence. `mixed_chunk`: decodes and chunks of prompts share a step,
    with at most `mixed_chunk_tokens` prompt tokens in it (0: what the budget leaves), which bounds how much a prompt slows the decodes beside it.
    `reserved_output`: share of an answer's expected length for which memory is kept at admission; 1 makes preemption rare, 0 fills the batch and computes
    again. `num_continuous_decode_steps`: decode steps of one scheduling round while nobody waits. `threads`: of one step's kernels.
    `reasoning_marks`: what is between these tokens, where the model has them, no grammar binds; None binds everything."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    weights: Literal["auto", "w8a8"] = "auto"
    block_tokens: int = 32
    kv_cache_bytes: int = 512 * 1024**2
    max_num_batched_tokens: int = 512
    chunk_tokens: int = 256
    max_num_seqs: int = 64
    admission: str = "fcfs"
    age_cap_s: float = 10.0
    reserved_output: float = 1.0
    mixed_chunk: bool = True
    mixed_chunk_tokens: int = 0
    num_continuous_decode_steps: Annotated[int, msgspec.Meta(ge=1)] = 1
    max_context_tokens: int = 4096
    threads: int = 1
    grammar_cache_bytes: int = 64 * 1024**2
    reasoning_marks: tuple[str, str] | None = ("<think>", "</think>")
    attention: str = "native"
    runner: str = "torch"
    prefix_cache: bool = True
    lora: LoraConfig = LoraConfig()
    check_integrity: bool = False  # run the conservation checks whenever the engine turns idle

    @property
    def weight_format(self) -> str:
        """The row of engine.linear.LINEARS that is meant. It decides the numbers, so it is part of every block's name."""
        plain = {"bfloat16": "bf16", "float32": "fp32"}[self.dtype]
        return plain if self.weights == "auto" else self.weights
