"""The fields of OpenAI request bodies: those in use with their types, and those that we know but do not support with the values that ask for nothing.

Knows nothing of what a field means. Invariant: a name is in one table only.
"""

from typing import Any, Literal

import msgspec

Endpoint = Literal["chat", "completion"]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class SharedFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both endpoints take."""

    model: str
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    return_token_ids: bool = False
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    logit_bias: dict[str, float] = {}
    bad_words: list[str] = []
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None


class TextPart(msgspec.Struct, frozen=True):
    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[TextPart]


class ChatFields(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


class CompletionFields(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    add_special_tokens: bool = True
    logprobs: int | None = None
    echo: bool = False


# Known fields that we do not support yet, with the values that ask for nothing (null always does).
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_decoding_backend": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "logits_processors": (),
    "return_tokens_as_token_ids": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "kv_transfer_params": (),
    "cache_salt": (),
    "mm_processor_kwargs": (),
    "store": (False,),
}
HARMLESS = {"user", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id"}
MESSAGE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": ("",),
    "audio": (),
    "annotations": ([],),
    "reasoning_content": ("",),
    "reasoning": ("",),
}
STREAM_NEUTRAL: dict[str, tuple[Any, ...]] = {"continuous_usage_stats": (False,)}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
ENDPOINT_FIELDS: dict[Endpoint, type[ChatFields] | type[CompletionFields]] = {"chat": ChatFields, "completion": CompletionFields}
