"""Settings of one worker process; written by the controller."""

from typing import Literal

import msgspec

from engine.config import EngineConfig
from kvstore.config import StoreConfig
from transport.config import TransportConfig

Role = Literal["prefill", "decode", "both"]


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model_path`: a folder with config.json, model.safetensors and tokenizer.json. `cores`: pin the process to these; empty leaves it free."""

    cluster: str
    name: str
    node: str
    role: Role
    redis_url: str
    token: str
    model_path: str
    model_name: str
    revision: str
    engine: EngineConfig
    store: StoreConfig
    transport: TransportConfig
    host: str = "127.0.0.1"
    port: int = 0
    cores: tuple[int, ...] = ()
    log_path: str = ""
